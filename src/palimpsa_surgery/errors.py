"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake in what the user asked for or supplied.

    Its message is one clear line that names what was wrong and what was got. The command line prints it
    on stderr and exits with code 2; library callers may catch it as a ValueError.
    """


class Unavailable(UserError):
    """Something outside gave way, and may be there again later: a network, a site, room on a disk.

    What has been done so far is kept, to go on from.
    """
