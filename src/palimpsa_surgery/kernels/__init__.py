"""The Palimpsa scan: a reference loop, a PyTorch path for any device, and one public dispatch."""

from .scan import ScanOutput, palimpsa_scan, palimpsa_step, ssd_scan, ssd_step

__all__ = ["ScanOutput", "palimpsa_scan", "palimpsa_step", "ssd_scan", "ssd_step"]
