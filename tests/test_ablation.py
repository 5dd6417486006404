"""What detach policies lose, in rows and in parts, on the smallest problems that show it."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from judged import judged
from small_steps import gradients

from lsverify import ablation, ablation_page, ablation_report, cli, evidence, pages, tracking
from lsverify.ablation import Request, ablate, default_policies
from lsverify.ablation_records import Ablation, Group, Row
from lsverify.errors import InputError
from lsverify.faults.state import values_not_differentiated
from lsverify.models import TINY
from lsverify.paths import longstraw, shared_prompts
from lsverify.policies import Policy
from lsverify.problems import Problem
from lsverify.prompt import capture
from lsverify.referee import Referee
from lsverify.setting import make_setting
from lsverify.state_term import distances, dot, minus, size, squared_state_terms, state_term

SMALL = {"lengths": (9,), "seeds": 1, "group_size": 3, "response_length": "3,1", "chunk": 4}
SIZES = "--lengths 9 --seeds 1 --group-size 3 --response-length 3,1 --chunk 4".split()
POLICIES = (
    "exact",
    "detach",
    "window:3",
    "kinds:recurrent",
    "kinds:sliding",
    "layers:9",
    "stale:2",
)


def request(arch, *policies):
    return Request(archs=(arch,), policies=policies, **SMALL)


@pytest.fixture(scope="module")
def measured():
    """The rows by policy and the state term of a hybrid model."""
    rows, (term,) = ablate(request("qwen3_5", *POLICIES), "qwen3_5")
    return {row.policy: row for row in rows}, term


@pytest.fixture(scope="module")
def llama():
    (config,) = request("llama").cases("llama")
    referee = Referee(make_setting(config))
    with referee.setting.computing():
        yield referee


@pytest.fixture
def result(measured):
    rows, term = measured
    return whole(rows.values(), [term])


def whole(rows, terms=()):
    return Ablation(
        environment=evidence.environment(),
        command=("ablate", "--arch", "qwen3_5"),
        dtype="float64",
        objective="grpo",
        rows=tuple(rows),
        state_terms=tuple(terms),
    )


def row_of(**fields):
    sizes = {"arch": "llama", "policy": "exact", "length": 9, "seed": 0, "status": "proven"}
    return Row(**(sizes | fields))


def test_every_path_has_the_gradient_it_claims_before_its_bias_is_told(measured):
    rows, _ = measured
    for spec in ("exact", "detach", "window:3", "kinds:recurrent"):
        assert rows[spec].status == "proven"
        assert rows[spec].to_claim <= 1e-12
        assert (rows[spec].rel_l2 > 0.05) == (spec != "exact")
    assert rows["exact"].rel_l2 <= 1e-12
    assert rows["exact"].tokens > rows["window:3"].tokens > rows["detach"].tokens
    assert rows["exact"].live_bytes > 0 < rows["exact"].live_bytes_full
    assert rows["exact"].seconds > 0 < rows["exact"].seconds_full


def test_what_does_not_fit_is_not_applicable_with_its_reason(measured):
    rows, _ = measured
    reasons = {
        "kinds:sliding": "no kind 'sliding'",
        "layers:9": "layer 9 has no state",
        "stale:2": "for lsverify gate",
    }
    for spec, reason in reasons.items():
        assert (rows[spec].status, rows[spec].rel_l2) == ("not_applicable", None)
        assert reason in rows[spec].detail


def test_the_kinds_of_state_sum_to_what_detach_loses(measured):
    rows, term = measured
    assert {part.kind for part in term.kinds} == {"conv", "recurrent", "attention"}
    assert math.fsum(part.projection for part in term.kinds) == pytest.approx(1, abs=1e-12)
    assert term.kinds_left <= 1e-12
    assert term.size == pytest.approx(rows["detach"].rel_l2, rel=1e-12)
    for part in term.kinds:
        assert part.projection == pytest.approx(part.norm * part.cosine, rel=1e-9)


def test_the_distances_sum_to_what_detach_loses(measured):
    _, term = measured
    assert [part.upto for part in term.distances] == [1, 2, 4, 7, 8]
    assert [part.above for part in term.distances] == [0, 1, 2, 4, 7]
    assert math.fsum(part.projection for part in term.distances) == pytest.approx(1, abs=1e-12)
    assert term.distances[-1].within == pytest.approx(1, abs=1e-12)
    assert term.distances_left <= 1e-12
    for share, tokens in term.held.items():
        later = [part.within for part in term.distances if part.upto >= tokens]
        assert min(later) >= float(share.rstrip("%")) / 100


def test_each_group_of_parameters_has_a_share_of_the_bias(measured):
    rows, _ = measured
    for groups in (rows["detach"].per_layer, rows["detach"].per_kind):
        assert math.fsum(group.lost for group in groups.values()) == pytest.approx(1)
    assert list(rows["detach"].per_layer) == ["0", "1", "2", "3", "-"]
    # The head sees no prompt position, so it loses nothing.
    assert rows["detach"].per_kind["head"].lost < 1e-20
    assert rows["detach"].per_kind["recurrent"].rel_l2 > 0.05


def test_the_bias_is_the_gates(measured):
    rows, _ = measured
    (config,) = request("qwen3_5").cases("qwen3_5")
    asked = config.model_dump(exclude={"candidate"}) | {"policy": "detach"}
    receipt = judged(**asked)
    bias, row = receipt.bias, rows["detach"]
    assert (row.rel_l2, row.cosine, row.norm_ratio) == (bias.rel_l2, bias.cosine, bias.norm_ratio)
    assert row.tokens == receipt.accounting["tokens_forwarded"]
    assert row.tokens_full == receipt.accounting["tokens_full"]


def test_a_broken_path_fails():
    rows, _ = ablate(request("llama", "exact"), "llama", lambda config: values_not_differentiated)
    (row,) = rows
    assert row.status == "failed"
    assert row.to_claim > 1e-3
    assert whole(rows).exit_code == 1
    assert any("failed" in remark for remark in ablation_report.remarks(whole(rows)))


def test_a_path_that_raises_is_an_error():
    def broken(model, problem, objective):
        raise ValueError("no such thing")

    rows, _ = ablate(request("llama", "detach"), "llama", lambda config: broken)
    assert (rows[0].status, rows[0].rel_l2) == ("error", None)
    assert rows[0].detail == "the path raised ValueError: no such thing"
    assert whole(rows).exit_code == 1


def test_roulettes_variance_is_that_of_all_its_outcomes(llama, monkeypatch):
    setting, p = llama.setting, 0.25
    problem: Problem = setting.problem
    hashes = [
        problem.prompt_hash(problem.group_of[members[0]]) for _, members in shared_prompts(problem)
    ]
    assert len(hashes) == 2
    step = (setting.model, problem, setting.objective)
    full = gradients(longstraw, *step)
    expected = 0.0
    for coins in itertools.product((0, 1), repeat=len(hashes)):
        up = dict(zip(hashes, coins, strict=True))
        monkeypatch.setattr(Policy, "scale", lambda self, prompt, seed, up=up: up[prompt] / p)
        drawn = gradients(longstraw, *step, policy=f"roulette:{p}")
        chance = math.prod(p if coin else 1 - p for coin in coins)
        expected += chance * size(minus(drawn, full)) ** 2
    monkeypatch.undo()
    assert (1 - p) / p * squared_state_terms(llama) == pytest.approx(expected, rel=1e-9)


def test_a_prompt_of_one_token_loses_nothing():
    rows, (term,) = ablate(
        Request(archs=("llama",), policies=("detach",), **(SMALL | {"lengths": (1,)})), "llama"
    )
    assert rows[0].rel_l2 <= 1e-12
    assert (term.kinds, term.distances, term.held) == ((), (), {"50%": None, "90%": None})
    ablation_report.markdown(whole(rows, [term]))
    ablation_page.render(whole(rows, [term]))


def test_distances_are_powers_of_two_and_the_boundary():
    assert distances(24) == [1, 2, 4, 8, 16, 23, 24]
    assert distances(9) == [1, 2, 4, 8, 9]
    assert (distances(2), distances(1), distances(0)) == ([1, 2], [1], [])


def test_the_bands_within_a_distance_are_what_a_window_of_it_sweeps(llama):
    setting = llama.setting
    step = (setting.model, setting.problem, setting.objective)
    detached = gradients(longstraw, *step, policy="detach")
    whole = minus(gradients(longstraw, *step, policy="exact"), detached)
    for part in state_term(llama, ["attention"]).distances:
        swept = minus(gradients(longstraw, *step, policy=f"window:{part.upto}"), detached)
        assert dot(swept, whole) / dot(whole, whole) == pytest.approx(part.within, abs=1e-12)


def test_default_policies_are_those_that_can_differ(llama):
    setting = llama.setting
    prompt = setting.problem.prompt(0)
    state = capture(setting.model, prompt, boundary=8, chunk=4, keep_from=8)
    expected = ("exact", "detach", "layers:0-1", "layers:2-3", "roulette:0.5")
    assert default_policies(setting.config, state) == expected
    assert ablation._ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_defaults_are_all_tiny_architectures_and_two_seeds():
    cases = [case for arch in Request().names() for case in Request().cases(arch)]
    assert {case.arch for case in cases} == set(TINY)
    assert [case.seed for case in cases[:2]] == [0, 1]
    (text,) = Request(dtype="float32").cases("smollm2-135m")
    assert (text.prompt_length, text.seed, text.chunk) == (512, 0, 512)


def test_processes_measure_the_same():
    wanted = Request(archs=("llama", "mistral"), policies=("detach",), **SMALL)
    lines: list[str] = []
    rows, terms = ablation.run(wanted, workers=2, progress=lines.append)
    assert [line.split()[:3] for line in lines] == [
        ["llama", "1", "proven"],
        ["mistral", "1", "proven"],
    ]
    here, (term,) = ablate(request("mistral", "detach"), "mistral")
    timeless = {"seconds": None, "seconds_full": None}
    assert rows[1].model_copy(update=timeless) == here[0].model_copy(update=timeless)
    assert terms[1] == term


def test_json_reads_back_as_it_was(result):
    odd = result.model_copy(update={"rows": (*result.rows, row_of(rel_l2=math.inf))})
    assert Ablation.model_validate_json(odd.model_dump_json()) == odd


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([row_of()], 0),
        ([row_of(), row_of(status="not_applicable")], 0),
        ([row_of(), row_of(status="failed")], 1),
        ([row_of(status="not_applicable")], 1),
        ([row_of(status="vacuous")], 1),
        ([], 1),
    ],
)
def test_the_exit_code_needs_something_shown_and_nothing_refuted(rows, code):
    assert whole(rows).exit_code == code


def test_references_that_disagree_are_a_failure(measured):
    _, term = measured
    broken = term.model_copy(update={"distances_left": 1e-9})
    assert whole([row_of()], [broken]).exit_code == 1
    (remark,) = ablation_report.remarks(whole([row_of()], [broken]))
    assert remark.startswith("qwen3_5 seed 0: the parts of the state term miss it by 1e-09")


def test_tables_average_over_seeds_and_show_the_spread():
    groups = {
        "0": Group(rel_l2=1, cosine=1, norm_ratio=1, lost=0.75),
        "-": Group(rel_l2=1, cosine=1, norm_ratio=1, lost=0.25),
    }
    some = {"policy": "detach", "limit": 1e-12, "to_claim": 2e-15, "per_layer": groups}
    rows = [
        row_of(rel_l2=0.25, cosine=0.9, **some),
        row_of(rel_l2=0.75, cosine=0.9, seed=1, **some),
    ]
    (sheet,) = ablation_report.sheets(whole(rows))
    cells = dict(zip(sheet.headers, sheet.rows[0], strict=True))
    assert cells["rel L2"] == "0.5 (0.25..0.75)"
    assert cells["cosine"] == "0.9"
    assert cells["claim"] == "proven 2.0e-15"
    assert cells["lost most in layer"] == "0: 75%"


def test_the_pareto_front_keeps_what_nothing_beats():
    points = [(1.0, 0.5, "a"), (2.0, 0.5, "b"), (2.0, 0.1, "c"), (3.0, 0.2, "d")]
    assert ablation_page.pareto(points) == [(1.0, 0.5, "a"), (2.0, 0.1, "c")]


def test_the_files_hold_tables_plots_and_reasons(result, tmp_path):
    assert ablation_report.write(result, tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"ablation.{end}" for end in ("html", "json", "md")
    ]
    page, text = (tmp_path / "ablation.html").read_text(), (tmp_path / "ablation.md").read_text()
    assert Ablation.model_validate_json((tmp_path / "ablation.json").read_text()) == result
    assert page.count("<svg") == 6
    assert "http" not in page
    for words in (
        "Bias against live bytes",
        "kinds:recurrent",
        "detach: share of the squared bias",
    ):
        assert words in page
    for words in ("| qwen3_5 | detach | 9 | proven", "kinds:sliding not applicable", "50% within"):
        assert words in text
    assert page == ablation_page.render(result)


def test_without_the_extra_the_page_is_left_out(result, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PACKAGES", ("jinja2", "no_such_package"))
    reason = ablation_report.write(result, tmp_path)
    assert reason == (
        "ablation.html is left out, since no_such_package is missing: pip install 'lsverify[report]'"
    )
    assert not (tmp_path / "ablation.html").exists()
    assert (tmp_path / "ablation.json").exists()


def test_the_command(tmp_path, capsys):
    arguments = ["ablate", "--arch", "llama", "--policy", "detach", *SIZES, "--json"]
    arguments += ["--out", str(tmp_path / "out")]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found == json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert found["command"] == arguments
    assert found["environment"]["deterministic"] is True
    assert printed.err.split()[:3] == ["llama", "1", "proven"]


def test_the_command_says_what_fails(monkeypatch, capsys):
    broken = row_of(status="failed", detail="far off")
    monkeypatch.setattr(ablation, "run", lambda *args, **options: ([broken], []))
    assert cli.run(["ablate", "--arch", "llama"]) == 1
    assert "llama exact seed 0: failed: far off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--lengths", "8,no"], "lengths '8,no' is not allowed"),
        (["--seeds", "0"], "seeds 0 is not allowed"),
        (["--workers", "0"], "workers 0 is not allowed"),
        (["--dtype", "bfloat16"], "use one of float64, float32"),
        (["--arch", "lama"], "architecture 'lama' is not known"),
        (["--policy", "windows:3"], "policy 'windows:3' is not known"),
        (["--objective", "ppo"], "objective 'ppo' is not known"),
        (["--wandb", "on"], "wandb 'on' is not known"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    assert cli.run(["ablate", *arguments]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert len(told.splitlines()) == 1


def test_a_folder_that_cannot_be_is_refused(tmp_path, result):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        ablation_report.write(result, tmp_path / "file")


def test_scalars_in_wandb_are_named_by_the_row():
    scalars = tracking._of_row(row_of(rel_l2=0.5))
    assert scalars == {"llama/exact/9/0/rel_l2": 0.5}
    assert tracking.log_ablation(whole([row_of()]), mode="disabled") is None
