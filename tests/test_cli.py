"""The command `fpmjax`: what it answers, how it refuses, and that it never shows a traceback for a user's mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from commands import shell
from hypothesis import given
from hypothesis import strategies as st

import fpmjax
from fpmjax.cli import arguments, main, output

TP1 = ("embedded", "--select", "tp=1")


# Lists of counts


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", [7]),
        ("1,4,8", [1, 4, 8]),
        ("8, 1", [8, 1]),
        ("0:3", [0, 1, 2, 3]),
        ("0:10:5", [0, 5, 10]),
        ("1:10:4", [1, 5, 9]),
        ("512:4096:x2", [512, 1024, 2048, 4096]),
        ("3:3:x9", [3]),
        ("1,2:3,x", None),
        ("4294967295", [4294967295]),
        ("00000000000000000012", [12]),
    ],
)
def test_lists_are_counts_and_ranges_with_both_ends(text, values):
    if values is None:
        with pytest.raises(arguments.argparse.ArgumentTypeError):
            arguments.counts(text)
    else:
        assert list(arguments.counts(text)) == values


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_a_range_is_every_step_from_begin_to_end(begin, length, step):
    assert list(arguments.counts(f"{begin}:{begin + length}:{step}")) == list(range(begin, begin + length + 1, step))


@given(st.text(alphabet="0123456789,:x- .eE_٣", max_size=12))
def test_no_text_breaks_the_reader_of_lists(text):
    try:
        values = arguments.counts(text)
    except arguments.argparse.ArgumentTypeError:
        return
    assert values and all(0 <= v <= arguments.U32_MAX for v in values)


# estimate


def test_a_product_is_every_combination_in_the_order_given(fpm):
    ran = fpm("estimate", *TP1, "--batch", "8,1", "--kv", "4096,1024", "--json")
    assert ran.code == 0 and not ran.err
    asked = [(q["work"][0]["decode_requests"], q["work"][0]["decode_kv"]) for q in ran.document["queries"]]
    assert asked == [(8, 4096), (8, 1024), (1, 4096), (1, 1024)]


def test_json_carries_the_bits_of_estimate(fpm, embedded_cell):
    ran = fpm("estimate", *TP1, "--batch", "1:40:3", "--kv-per-request", "1000,3000", "--draft-length", "1:4", "--json")
    batch, each, depth = np.meshgrid(np.arange(1, 41, 3), [1000, 3000], [1, 2, 3, 4], indexing="ij")
    work = fpmjax.Work.decode(batch, batch * each)
    whole: Any = fpmjax.estimate(fpmjax.direct(embedded_cell), work, draft_length=depth)
    queries = ran.document["queries"]
    assert [q["latency_ms"] for q in queries] == whole.latency_ms.ravel().tolist()
    assert [q["stp_latency_ms"] for q in queries] == whole.stp.latency_ms.ravel().tolist()
    assert [q["scaling_factor"] for q in queries] == whole.scaling_factor.ravel().tolist()
    assert [q["in_study_range"] for q in queries] == whole.calibrated.ravel().tolist()


def test_text_aligns_columns_and_names_units(fpm):
    ran = fpm("estimate", *TP1, "--batch", "1,8", "--kv", "8192")
    assert ran.out == "batch  KV tokens  latency ms\n    1      8,192     13.7632\n    8      8,192     13.6663\n"


def test_a_speculative_answer_shows_factor_and_reference(fpm):
    ran = fpm("estimate", *TP1, "--batch", "8", "--kv-per-request", "1024", "--draft-length", "3")
    assert "= factor  x STP ms  in study range" in ran.out
    assert ran.out.splitlines()[1].split() == ["8", "8,192", "3", "20.9123", "1.49", "14.0351", "yes"]
    assert ran.out.splitlines()[2] == (
        "in study range: batch to 8, KV to 4,096 a request, draft length to 4; the study ran TP1, BF16, "
        "this cell is TP1, BF16"
    )


def test_a_mixed_iteration_is_prefill_and_decode_together(fpm):
    asked = ("--batch", "3", "--kv", "3000", "--prefill-requests", "1", "--prefill-tokens", "100")
    ran = fpm("estimate", *TP1, *asked, "--json", "--detail")
    (query,) = ran.document["queries"]
    (rank,) = query["ranks"]
    assert query["latency_ms"] == rank["prefill_ms"] + max(rank["decode_ms"] - rank["baseline_ms"], 0)
    assert [each["phase"] for each in rank["lookups"]] == ["prefill", "decode", "baseline"]


def test_detail_reproduces_the_number_from_measured_rows(fpm, embedded_cell):
    ran = fpm("estimate", *TP1, "--batch", "5,1", "--kv", "5000", "--draft-length", "2", "--json", "--detail")
    measured = dict(zip(embedded_cell.decode.row.tolist(), embedded_cell.decode.latency_ms.tolist(), strict=True))
    for query in ran.document["queries"]:
        (lookup,) = query["ranks"][0]["lookups"]
        assert lookup["batch_size"] == 3 * query["work"][0]["decode_requests"]
        assert all(measured[p["row"]] == p["latency_ms"] for p in lookup["support"])
        blend = sum(p["weight"] * p["latency_ms"] for p in lookup["support"])
        assert blend == pytest.approx(query["stp_latency_ms"], rel=1e-14)


def test_detail_as_text_names_rows_coordinates_and_weights(fpm):
    ran = fpm("estimate", *TP1, "--batch", "3", "--kv", "1024", "--detail")
    assert "    decode batch 3, 1,024 KV: 13.4034 ms, cross_batch_interpolation\n" in ran.out
    assert "      0.500 x 13.4044 ms measured at batch 2, 1,024 KV, row 15\n" in ran.out


def test_a_verify_width_is_the_lookup_at_so_many_rows(fpm):
    wide = fpm("estimate", *TP1, "--batch", "2", "--kv", "4096", "--verify-width", "4", "--json", "--detail").document
    plain = fpm("estimate", *TP1, "--batch", "8", "--kv", "4096", "--json").document
    assert wide["queries"][0]["latency_ms"] == plain["queries"][0]["latency_ms"]
    assert wide["queries"][0]["ranks"][0]["lookups"][0]["batch_size"] == 8


def test_partial_refusals_are_counted_on_stderr_and_explained(fpm):
    ran = fpm("estimate", *TP1, "--batch", "8,128", "--kv-per-request", "1024", "--draft-length", "3,4", "--json")
    assert ran.code == 0
    assert ran.document["answered"] == 3 and ran.document["refused"] == {"decode_no_two_sided_batch_bracket": 1}
    assert [q["latency_ms"] is None for q in ran.document["queries"]] == [False, False, False, True]
    assert ran.document["queries"][3]["status"] == "decode_no_two_sided_batch_bracket"
    assert ran.err.startswith(
        "note: 1 of 4 queries have no answer (1 decode_no_two_sided_batch_bracket), for example: "
    )
    assert "batch_size=640" in ran.err and "\nhint: " in ran.err


def test_nothing_covered_is_exit_3_with_the_reason(fpm):
    ran = fpm("estimate", *TP1, "--batch", "1000", "--kv", "5000", "--json")
    assert ran.code == 3 and ran.document["queries"][0]["latency_ms"] is None
    assert ran.err.startswith("error: decode batch_size=1000")
    several = fpm("estimate", *TP1, "--batch", "1000,2000", "--kv", "5000")
    assert several.code == 3 and several.err.startswith("note: 2 of 2 queries have no answer")
    assert several.out.count("decode_no_two_sided_batch_bracket") == 2


def test_a_draft_length_on_prefill_is_bad_input(fpm):
    ran = fpm("estimate", *TP1, "--prefill-requests", "1", "--prefill-tokens", "64", "--draft-length", "2")
    assert ran.code == 2 and "not_pure_decode" in ran.out and "error: a draft length needs pure decode" in ran.err


def test_an_idle_iteration_takes_no_time(fpm):
    ran = fpm("estimate", *TP1, "--batch", "0", "--kv", "0", "--json")
    assert ran.document["queries"][0] | {"work": None} == {
        "work": None,
        "status": "idle",
        "latency_ms": 0.0,
        "rank": -1,
    }


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--batch -1 --kv 5", "'-1' is not a count or a range"),
        ("--batch 1.5 --kv 5", "'1.5' is not a count"),
        ("--batch true --kv 5", "'true' is not a count"),
        ("--batch ٣ --kv 5", "is not a count"),
        ("--batch 1_000 --kv 5", "is not a count"),
        ("--batch 1,,2 --kv 5", "'' is not a count"),
        ("--batch 4294967296 --kv 5", "out of range: counts go from 0 to 4294967295"),
        (f"--batch {'9' * 6000} --kv 5", "out of range"),
        ("--batch 5:1 --kv 5", "the range 5:1 ends before it begins"),
        ("--batch 1:5:0 --kv 5", "a step of 0"),
        ("--batch 1:5:x1 --kv 5", "never ends"),
        ("--batch 0:5:x2 --kv 5", "never ends"),
        ("--batch 0:4294967295 --kv 5", "'0:4294967295' makes the list longer than 1,000,000 values"),
        ("--batch 1:2000 --kv 1:2000", "the lists make 4,000,000 queries, more than the 1,000,000 that"),
        ("--batch 3,65536 --kv-per-request 65536", "--batch 65536 times --kv-per-request 65536 is 4294967296"),
        ("--batch 0 --kv 5", "decode_kv[0] is 5 while decode_requests is 0"),
        ("--batch 5", "--batch needs --kv or --kv-per-request"),
        ("--kv 5", "--kv needs --batch"),
        ("--kv-per-request 5", "--kv-per-request needs --batch"),
        ("--prefill-tokens 5", "--prefill-tokens needs --prefill-requests"),
        ("--prefill-requests 5", "--prefill-requests needs --prefill-tokens"),
        ("--prefill-kv 5", "--prefill-kv needs --prefill-requests and --prefill-tokens"),
        ("", "nothing is asked"),
        ("--batch 1 --kv 5 --kv-per-request 5", "not allowed with"),
        ("--batch 1 --kv 5 --metrics x", "--metrics says what is asked, so --batch cannot be given as well"),
        ("--batch 1 --kv 5 --draft-length 2,4294967295", "draft_length=4294967295"),
        ("--batch 1 --kv 5 --draft-length 1 --verify-width 2", "verify_width=2"),
        ("--batch 1 --kv 5 --verify-width 0", "'0' is not a whole number from 1"),
        ("--batch 1 --kv 5 --bat 2", "unrecognized arguments: --bat 2"),
        ("--batch 1 --kv 5 --select tp=3", "No FPM cell matches"),
        ("--batch 1 --kv 5 --select tp=1.0", "tp is a whole number"),
        ("--batch 1 --kv 5 --select enable_eplb=1", "enable_eplb is true or false"),
        ("--batch 1 --kv 5 --select modell=x", "did you mean model"),
        ("--batch 1 --kv 5 --select tp", "is not FIELD=VALUE"),
        ("--batch 1 --kv 5 --select tp=1 --select tp=2", "--select tp is given twice"),
    ],
)
def test_bad_arguments_are_exit_2_with_a_reason_and_a_hint(fpm, asked, said):
    select = () if "--select" in asked else TP1[1:]
    fpm("estimate", "embedded", *select, *asked.split()).refused(said)


def test_totals_up_to_the_largest_count_are_exact(fpm):
    ran = fpm("estimate", *TP1, "--batch", "65535", "--kv-per-request", "65537", "--json")
    assert ran.code == 3 and ran.document["queries"][0]["work"][0]["decode_kv"] == 2**32 - 1


def test_several_cells_are_listed_with_the_flags_that_tell_them_apart(fpm):
    ran = fpm("estimate", "embedded", "--batch", "1", "--kv", "5")
    ran.refused(
        "embedded holds 3 cells that match; choose one with",
        "\n  --select tp=1\n  --select tp=2\n  --select tp=4\nhint: add --select tp=1",
    )


# inspect, demo, selfcheck, help


def test_inspect_shows_clock_digest_and_coverage_per_batch(fpm, embedded_cells):
    ran = fpm("inspect", "embedded", "--select", "tp=1")
    assert embedded_cells.digest in ran.out and "timing_boundary=schedule_to_update" in ran.out
    assert "dynamo_native_single_sample_v1 (schema 7)" in ran.out
    assert "        8      11        8..262,144\n" in ran.out and "capture rungs 1\n" in ran.out


def test_inspect_json_is_the_cell(fpm, embedded_cell):
    ran = fpm("inspect", "embedded", "--json")
    assert [cell["identity"]["tp"] for cell in ran.document["cells"]] == [1, 2, 4]
    cell = ran.document["cells"][0]
    bounds = {row["batch_size"]: tuple(row["total_kv_read_tokens"]) for row in cell["decode"]}
    assert bounds == embedded_cell.decode_curve_bounds
    assert sum(row["points"] for row in cell["decode"]) == cell["decode_points"] == len(embedded_cell.decode)
    assert cell["prefill_points"] == len(embedded_cell.prefill)


def test_inspect_needs_no_jax():
    script = "import sys, fpmjax.cli as c; code = c.main(['inspect', 'embedded']); print('jax' in sys.modules, code)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False 0"


@pytest.mark.parametrize("command", ["inspect", "estimate"])
@pytest.mark.parametrize("content", [b"", b"PAR1", bytes(range(256)) * 9, "çüß".encode()])
def test_a_file_that_is_no_table_is_refused(fpm, tmp_path, command, content):
    asked = ("--batch", "1", "--kv", "5") if command == "estimate" else ()
    table = tmp_path / "täble.parquet"
    table.write_bytes(content)
    fpm(command, table, *asked).refused("missing its metadata sidecar")
    table.with_suffix(".metadata.json").write_bytes(content)
    fpm(command, table, *asked).refused("not valid JSON")
    fpm(command, tmp_path / "none", *asked).refused("does not exist")
    fpm(command, tmp_path, *asked).refused("does not exist")
    fpm(command, "a\0b", *asked).refused()


def test_the_demo_answers_shows_evidence_and_explains_a_refusal(fpm):
    ran = fpm("demo")
    assert ran.code == 0 and not ran.err
    assert max(map(len, ran.out.splitlines())) <= 120
    assert "    8       4,096   none     8     14.5698" in ran.out
    assert "23.6721  = 1.57  x 15.0778  0.750 (32, 32,768) + 0.250 (64, 32,768)" in ran.out
    assert "draft_length=4 " in ran.out and "batch_size=640" in ran.out
    assert "clock" in ran.out and "schedule_to_update" in ran.out


@pytest.mark.parametrize(
    "command", [(), ("demo",), ("inspect",), ("estimate",), ("coverage",), ("table", "build"), ("selfcheck",)]
)
def test_help_teaches_by_example(fpm, command):
    ran = fpm(*command, "--help")
    assert ran.code == 0 and "examples:\n  fpmjax" in ran.out and "usage: fpmjax" in ran.out


def test_embedded_is_explained_in_help(fpm):
    assert "`embedded`" in fpm("--help").out and "`embedded`" in fpm("estimate", "--help").out


@pytest.mark.parametrize("argv", [(), ("table",), ("nothing",), ("estimate",), ("inspect", "embedded", "x"), ("--no",)])
def test_a_wrong_command_line_points_to_help(fpm, argv):
    fpm(*argv).refused("--help`")


def test_out_of_memory_is_no_traceback(fpm, monkeypatch):
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("fpmjax.cli.inspect.open_cells", exhausted)
    fpm("inspect", "embedded").refused("error: out of memory\nhint: ask in smaller pieces")


def test_interruption_is_quiet(fpm, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fpmjax.cli.inspect.open_cells", interrupt)
    ran = fpm("inspect", "embedded")
    assert ran.code == 130 and ran.err == "interrupted\n"


# As a user runs it


@pytest.mark.smoke
def test_python_m_fpmjax_is_the_command():
    ran = shell("--version")
    assert (ran.returncode, ran.stdout) == (0, f"fpmjax {fpmjax.__version__}\n")


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m fpmjax estimate embedded --select tp=1 --batch 1:512 --kv 1024:90000:1024"
    script = f"set -o pipefail; {command} | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ran.stdout.startswith("batch  KV tokens  latency ms") and ran.stdout.count("\n") == 1
    assert ran.returncode == 141
    assert all(line.startswith(("note: ", "hint: ")) for line in ran.stderr.splitlines())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_not_a_traceback():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "fpmjax", "inspect", "embedded"], stdout=full, stderr=subprocess.PIPE
        )
    assert ran.returncode == 2 and ran.stderr == b"error: output: No space left on device\n"


def test_a_terminal_without_unicode_gets_escapes(tmp_path):
    ran = shell("inspect", "--help", env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert ran.returncode == 0
    missing = shell("inspect", tmp_path / "tâble", env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert missing.returncode == 2 and "t\\xe2ble" in missing.stderr


# Numbers as they are shown


def test_shown_numbers_never_claim_what_they_are_not():
    assert output.ms(float("nan")) == "-" and output.ms(1.5e-5) == "1.5e-05" and output.ms(0.0) == "0.0000"
    assert output.weight(1.0) == "1.000" and output.weight(0.99999) == "0.99999" and output.weight(1e-9) == "1e-09"
    assert output.percent(0, 7) == "0.0%" and output.percent(1, 10**6) == "<0.1%"
    assert output.percent(10**6 - 1, 10**6) == ">99.9%" and output.percent(7, 7) == "100.0%"
    assert output.percent(0, 0) == "-"


def test_json_refuses_nan():
    with pytest.raises(ValueError):
        output.print_json({"x": float("nan")})


def test_main_takes_arguments_and_returns_the_code(capsys):
    assert main(["inspect", "embedded", "--json"]) == 0
    json.loads(capsys.readouterr().out)
