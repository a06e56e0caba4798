"""State initialisation: each kind against its definition, and interrupted and resumed to the bit."""

import itertools
import json

import numpy as np
import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import LayerState
from palimpsa_surgery.stages.data import ContinuedOrder, Sequences, collate, prepare, training_order
from palimpsa_surgery.stages.held_out import evaluate
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.stages.states import make_initial_states
from palimpsa_surgery.stages.trainer import StageTrainer, quiet_transformers

KINDS = {
    "zero": {"kind": "zero"},
    "random_noise": {"kind": "random_noise", "sigma": 0.1},
    "fitted_noise": {"kind": "fitted_noise"},
    "state_passing": {"kind": "state_passing", "zero_probability": 0.4},
    "tbtt": {"kind": "tbtt"},
}
GOES_ON = {kind: {"continues": torch.tensor(True)} if kind == "tbtt" else {} for kind in KINDS}


@pytest.fixture
def stage_of(recipe_dict, write_recipe):
    """A stage of the small recipe, two rows in a micro-batch and two micro-batches a step, with changes."""

    def make(kind, **fields):
        fields = {"batch_tokens": 128, "micro_batch_tokens": 64, "tokens": 640, "state": KINDS[kind]} | fields
        recipe_dict["stages"] = [recipe_dict["stages"][0] | fields]
        return load_recipe(write_recipe(recipe_dict)).stages[0]

    return make


@pytest.fixture
def sequences_of(tmp_path, tokenizer):
    def make(stage):
        if not (tmp_path / "data").exists():
            prepare(stage, tokenizer, tmp_path / "data")
        return Sequences(tmp_path / "data", stage)

    return make


@pytest.fixture
def states_of(small_model, stage_of):
    def make(kind, seed=0, rank=0, ranks=1, **settings):
        settings = stage_of(kind, state=KINDS[kind] | settings).state
        place = {"seed": seed, "rank": rank, "ranks": ranks}
        return make_initial_states(settings, small_model.config, device=torch.device("cpu"), **place)

    return make


@pytest.fixture
def trainer_of(small_model, sequences_of, tmp_path):
    def make(stage, folder="stage", steps=5):
        order = training_order(
            sequences_of(stage), stage, steps=steps, seed=3, stage_index=0, rows=stage.micro_batch_sequences
        )
        return StageTrainer(
            small_model,
            stage,
            order,
            Snapshots(tmp_path / folder, keep=2),
            steps=steps,
            seed=3,
            checkpoint_steps=2,
            advance=lambda *_: None,
        )

    return make


def final_states(rows=2, seed=0):
    """What the small model might leave: a Mamba2 layer's and a Palimpsa layer's states."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(rows, *shape, generator=generator)

    palimpsa = draw(4, 2, 16, 8) * 3 + 1
    palimpsa[:, :, 1].abs_()
    return [LayerState(draw(80, 4), draw(4, 16, 8)), LayerState(draw(80, 4), palimpsa)]


def spy(model):
    """Record the initial and final states of every forward pass."""
    seen = []

    def hook(module, args, kwargs, output):
        seen.append((kwargs["initial_states"], output.final_states))

    model.register_forward_hook(hook, with_kwargs=True)
    return seen


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- Each kind by its definition --------------------------------------------------------------------------------


def test_zero_asks_for_nothing(states_of):
    states = states_of("zero")
    assert states.before(2) is None
    assert not states.wants_final


def test_random_noise_has_the_given_scale_and_no_negative_importance(states_of):
    mamba2, palimpsa = states_of("random_noise", sigma=0.5).before(400)
    assert mamba2.conv_state is None
    assert palimpsa.conv_state is None
    assert mamba2.recurrent_state.shape == (400, 4, 16, 8)
    for values in (mamba2.recurrent_state, palimpsa.recurrent_state[:, :, 0]):
        assert values.mean().abs() < 0.01
        assert values.std() == pytest.approx(0.5, rel=0.01)
    importance = palimpsa.recurrent_state[:, :, 1]
    assert importance.min() >= 0
    assert importance.square().mean().sqrt() == pytest.approx(0.5, rel=0.01)


def test_noise_belongs_to_a_sequence_of_the_stage(states_of):
    """Whatever rank has it, in a micro-batch of any size."""

    def drawn(passes, rows, **key):
        states = states_of("random_noise", **key)
        return torch.cat([states.before(rows)[1].recurrent_state for _ in range(passes)])

    alone = drawn(1, 8)
    assert len(alone.flatten(1).unique(dim=0)) == 8
    assert torch.equal(drawn(4, 2), alone)
    first, second = (drawn(2, 2, rank=rank, ranks=2) for rank in range(2))
    assert torch.equal(torch.cat([first[:2], second[:2], first[2:], second[2:]]), alone)
    assert not torch.equal(drawn(1, 8, seed=1), alone)


def test_fitted_noise_follows_equations_5_and_6(states_of):
    """The newest final states weigh 0.9, what came before 0.1, for each layer, head and part of the state."""
    states = states_of("fitted_noise")
    for state in states.before(3):
        assert not state.recurrent_state.any(), "nothing is known yet"
    mean = variance = 0.0
    for seed in range(3):
        final = final_states(seed=seed)
        states.after(final)
        importance = final[1].recurrent_state[:, 2, 1].double()  # layer 1, head 2
        mean = 0.9 * importance.mean() + 0.1 * mean
        variance = 0.9 * importance.var(unbiased=False) + 0.1 * variance
    assert_close(states.mean[1][2, 1], mean, 1e-12)
    assert_close(states.variance[1][2, 1], variance, 1e-12)
    assert states.mean[0].shape == (4,)

    drawn = [state.recurrent_state for state in states.before(3000)]
    assert drawn[1][:, :, 1].min() >= 0
    memory = drawn[1][:, 3, 0].double()
    assert memory.mean() == pytest.approx(states.mean[1][3, 0].item(), abs=0.02)
    assert memory.var() == pytest.approx(states.variance[1][3, 0].item(), rel=0.02)


def test_state_passing_hands_on_or_zeroes_whole_rows(states_of):
    states = states_of("state_passing", zero_probability=0.1)
    assert states.before(2) is None
    final = final_states(rows=1000)
    states.after(final)
    passed = states.before(1000)
    assert all(state.conv_state is None for state in passed)
    zeroed = (passed[0].recurrent_state == 0).flatten(1).all(1)
    assert 70 <= zeroed.sum() <= 130
    for state, left in zip(passed, final, strict=True):
        assert torch.equal(state.recurrent_state[~zeroed], left.recurrent_state[~zeroed])
        assert not state.recurrent_state[zeroed].any()


@pytest.mark.parametrize("kind", ["state_passing", "tbtt"])
def test_a_row_that_is_not_finite_is_not_carried_on(kind, states_of):
    """Neither in the layer where it went wrong nor in the others; a sound row is as it was."""
    states = states_of(kind, **({"zero_probability": 0.0} if kind == "state_passing" else {}))
    final = final_states()
    final[1].recurrent_state[0, 1, 0, 2, 3] = float("nan")
    states.after(final)
    for state, left in zip(states.before(2, torch.tensor([True, True])), final, strict=True):
        assert not state.recurrent_state[0].any()
        assert torch.equal(state.recurrent_state[1], left.recurrent_state[1])


def test_statistics_leave_out_what_is_not_finite(states_of):
    states = states_of("fitted_noise")
    states.after(final_states())
    before = states.mean[1].clone(), states.variance[1].clone()
    final = final_states(seed=1)
    final[1].recurrent_state[0, 1, 0, 2, 3] = float("inf")
    states.after(final)
    for now, old in zip((states.mean[1], states.variance[1]), before, strict=True):
        assert torch.equal(now[1, 0], old[1, 0])
        assert now.isfinite().all()
        assert not torch.equal(now[0], old[0])


def test_tbtt_carries_both_states_of_rows_that_go_on(states_of):
    states = states_of("tbtt")
    final = final_states()
    states.after(final)
    carried = states.before(2, torch.tensor([True, False]))
    for state, left in zip(carried, final, strict=True):
        for value, expected in zip(state, left, strict=True):
            assert torch.equal(value[0], expected[0])
            assert not value[1].any()


# --- In training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state_passing", "tbtt"])
def test_states_pass_from_micro_batch_to_micro_batch(kind, trainer_of, stage_of, small_model):
    """Across the border between two steps too."""
    seen = spy(small_model)
    settings = KINDS[kind] | ({"zero_probability": 0.0} if kind == "state_passing" else {})
    with quiet_transformers():
        trainer = trainer_of(stage_of(kind, state=settings, packing={"reset_at_documents": False}), steps=2)
        trainer.train()
    assert len(seen) == 4, "two micro-batches a step"
    assert seen[0][0] is None
    for number, ((_, left), (started, _)) in enumerate(itertools.pairwise(seen), start=1):
        rows = [trainer.train_dataset[2 * number + row].get("continues", torch.tensor(True)) for row in range(2)]
        kept = torch.stack(rows)
        assert kept.any()
        for before, after in zip(left, started, strict=True):
            assert not after.recurrent_state.requires_grad
            assert torch.equal(after.recurrent_state[kept], before.recurrent_state[kept])
            assert not after.recurrent_state[~kept].any()
            if kind == "tbtt":
                assert torch.equal(after.conv_state[kept], before.conv_state[kept])
            else:
                assert after.conv_state is None


@pytest.mark.parametrize("kind", ["fitted_noise", "tbtt"])
def test_gradient_checkpointing_changes_nothing(kind, trainer_of, stage_of, small_model):
    start = weights(small_model)
    results = []
    for checkpointing in (False, True):
        small_model.load_state_dict(start)
        with quiet_transformers():
            trainer_of(stage_of(kind, gradient_checkpointing=checkpointing), folder=str(checkpointing), steps=2).train()
        results.append(weights(small_model))
    for name, value in results[0].items():
        assert_close(results[1][name], value, 1e-5, name)


def test_each_kind_trains_otherwise_than_zero(trainer_of, stage_of, small_model, tmp_path):
    start, losses = weights(small_model), {}
    for kind in KINDS:
        small_model.load_state_dict(start)
        # One order of the data for all kinds, so that nothing but the states can differ.
        trainer = trainer_of(stage_of(kind, packing={"reset_at_documents": False}), folder=kind, steps=2)
        trainer.train_dataset = [trainer.train_dataset.sequences[i] | GOES_ON[kind] for i in range(8)]
        with quiet_transformers():
            trainer.train()
        losses[kind] = json.loads((tmp_path / kind / "log.jsonl").read_text().splitlines()[1])["loss"]
    assert len(set(losses.values())) == len(KINDS), losses


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed_is_the_same_to_the_bit(kind, trainer_of, stage_of, small_model, tmp_path, monkeypatch):
    """Stopped in the fourth step, between its micro-batches; resumed from the checkpoint at the second."""
    stage = stage_of(kind)
    start = weights(small_model)
    with quiet_transformers():
        whole = trainer_of(stage, "whole")
        whole.train()
        expected = weights(small_model)
        carried = whole.initial_states.state_dict()

        small_model.load_state_dict(start)
        original, calls = StageTrainer.training_step, []

        def interrupted(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 8:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(StageTrainer, "training_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trainer_of(stage, "resumed").train()
        small_model.load_state_dict(start)  # a new process has nothing but the checkpoint
        resumed = trainer_of(stage, "resumed")
        checkpoint = tmp_path / "resumed" / "checkpoint-2"
        assert resumed.snapshots.newest()[0] == checkpoint
        resumed.train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(value, expected[name]) for name, value in small_model.state_dict().items())
    torch.testing.assert_close(resumed.initial_states.state_dict(), carried, rtol=0, atol=0)


def test_resuming_needs_as_many_processes(trainer_of, stage_of, tmp_path):
    stage = stage_of("state_passing")
    with quiet_transformers():
        trainer_of(stage, steps=2).train()
        path = tmp_path / "stage" / "checkpoint-2" / "states-rank0.pt"
        torch.save(torch.load(path) | {"ranks": 2}, path)
        with pytest.raises(UserError, match=r"was not written by 1 processes, and state state_passing belongs to each"):
            trainer_of(stage, steps=4).train(resume_from_checkpoint=path.parent)


def test_validation_starts_from_zero(stage_of, sequences_of, small_model):
    stage = stage_of("state_passing")
    seen = []
    small_model.register_forward_hook(lambda m, a, k, o: seen.append(k.get("initial_states")), with_kwargs=True)
    evaluate(small_model, sequences_of(stage), max_tokens=256, batch_size=2)
    assert seen
    assert set(seen) == {None}


# --- Packed documents -------------------------------------------------------------------------------------------


def test_a_carried_state_belongs_to_the_first_document_of_a_row(small_model):
    ids = torch.randint(1, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 10 + [1] * 14], dtype=torch.int32)
    with torch.no_grad():
        states = small_model(ids, return_final_states=True).final_states
        carried = small_model(ids, seq_idx=documents, initial_states=states).logits
        zero = small_model(ids, seq_idx=documents).logits
    assert (carried[:, :10] - zero[:, :10]).abs().max() > 1e-4
    assert torch.equal(carried[:, 10:], zero[:, 10:])


# --- The order for tbtt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_each_lane_reads_on_in_the_text(lanes, stage_of, sequences_of):
    sequences = sequences_of(stage_of("tbtt", packing={"reset_at_documents": False}))
    training = sequences.training
    length = len(training) // lanes
    order = ContinuedOrder(sequences, count=2 * length * lanes, seed=0, stage_index=0, lanes=lanes)
    rows = [order[position] for position in range(len(order))]
    by_tokens = {sequences[index]["input_ids"].numpy().tobytes(): index for index in training}
    where = np.array([by_tokens[row["input_ids"].numpy().tobytes()] for row in rows]).reshape(2, length, lanes)
    goes_on = np.array([row["continues"].item() for row in rows]).reshape(2, length, lanes)
    assert not goes_on[:, 0].any()
    assert (goes_on[:, 1:] == (where[:, 1:] == where[:, :-1] + 1)).all()
    for lap in where:
        assert len(np.unique(lap)) == lanes * length, "each once a lap"
    assert (~goes_on[:, 1:]).sum() <= 2, "the ring is open at one place"


def test_a_row_that_begins_a_document_does_not_go_on(stage_of, sequences_of):
    """A short length, so that some sequence ends exactly where a document does."""
    stage = stage_of("tbtt", sequence_length=4, batch_tokens=16, micro_batch_tokens=8, tokens=640)
    sequences = sequences_of(stage)
    order = ContinuedOrder(sequences, count=len(sequences.training), seed=0, stage_index=0, lanes=1)
    rows = [order[position] for position in range(len(order))]
    ends = [bool(row["input_ids"][-1] == sequences.eos_token_id) for row in rows]
    after = [row["continues"].item() for row in rows[1:]]
    assert any(ends[:-1])
    assert not any(goes_on for ended, goes_on in zip(ends, after, strict=False) if ended)
    assert sum(after) >= len(after) - sum(ends) - 1


def test_chunks_with_carried_states_equal_one_long_sequence(stage_of, sequences_of, small_model):
    """Four chunks in a lane, through the order, the collator and the carried states, against one pass."""
    stage = stage_of("tbtt")
    sequences = sequences_of(stage)
    order = ContinuedOrder(sequences, count=8, seed=1, stage_index=0, lanes=2)
    states = make_initial_states(stage.state, small_model.config, device=torch.device("cpu"), seed=0)
    pieces, ids, documents, went_on = [], [], [], []
    for start in range(0, 8, 2):
        batch = collate([order[start], order[start + 1]])
        continues = batch.pop("continues")
        went_on.append(continues)
        with torch.no_grad():
            out = small_model(
                batch["input_ids"],
                seq_idx=batch["seq_idx"],
                initial_states=states.before(2, continues),
                return_final_states=True,
            )
        states.after(out.final_states)
        pieces.append(out.logits)
        ids.append(batch["input_ids"])
        # Where a row does not go on, the long sequence has a document's border too.
        before = documents[-1][:, -1:] + (~continues)[:, None] if documents else 0
        documents.append(batch["seq_idx"] + before)
    assert {True, False} == set(torch.stack(went_on[1:]).flatten().tolist())
    with torch.no_grad():
        whole = small_model(torch.cat(ids, 1), seq_idx=torch.cat(documents, 1)).logits
    assert_close(torch.cat(pieces, 1), whole, 1e-5)


def test_too_few_sequences_for_the_rows(stage_of, sequences_of):
    stage = stage_of("tbtt")
    sequences = sequences_of(stage)
    with pytest.raises(UserError, match=r"a training sequence for each row .*, 500 in all; the data hold \d+"):
        training_order(sequences, stage, steps=1, seed=0, stage_index=0, rows=500)


# --- The recipe -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"kind": "noise"},
            r"stages\[0\]\.state\.kind: must be one of zero, random_noise, fitted_noise, state_passing",
        ),
        ({"kind": "random_noise"}, r"stages\[0\]\.state\.sigma: required"),
        ({"kind": "random_noise", "sigma": -1.0}, r"stages\[0\]\.state\.sigma: must be greater than 0"),
        ({"kind": "state_passing", "zero_probability": 1.5}, r"stages\[0\]\.state\.zero_probability: must be less"),
        ({"kind": "tbtt", "sigma": 1.0}, r"stages\[0\]\.state\.sigma: unknown key"),
        ("zero", r"stages\[0\]\.state"),
    ],
)
def test_bad_settings_name_their_field(state, message, recipe_dict, write_recipe):
    recipe_dict["stages"][0]["state"] = state
    with pytest.raises(UserError, match=message):
        load_recipe(write_recipe(recipe_dict))


def test_tbtt_needs_text(recipe_dict, write_recipe, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n')
    recipe_dict["stages"][0] |= {"data": {"kind": "instruction", "files": [str(path)]}, "state": {"kind": "tbtt"}}
    with pytest.raises(UserError, match=r"stages\[0\]\.state: tbtt needs data of kind text"):
        load_recipe(write_recipe(recipe_dict))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_each_kind_trains_under_autocast(kind, trainer_of, stage_of, small_model, tmp_path):
    seen = spy(small_model)
    with quiet_transformers():
        stage = stage_of(kind, gradient_checkpointing=True, learning_rate=1e-2, tokens=128 * 20)
        trainer_of(stage, steps=20).train()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "stage" / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    for started, left in seen[1:]:
        for state in (*(started or ()), *(left or ())):
            assert state.recurrent_state.is_cuda
            assert state.recurrent_state.dtype == torch.float32
            assert torch.isfinite(state.recurrent_state).all()
