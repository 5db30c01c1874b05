"""Workloads of `vtoken plan`: what a file says, and what is refused, with the line."""

from pathlib import Path

import pytest

from vtoken.planning.trace import Arrival, Workload, read_workload, within

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINE = '{"input_length": 800, "output_length": 200}'


def written(directory: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


class TestCsv:
    def test_read(self, tmp_path: Path) -> None:
        rows = "2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.7500000,396,109\n"
        assert read_workload(written(tmp_path, HEADER + rows, "t.csv")) == [
            Arrival(0.0, 374, 44),
            Arrival(4.25, 396, 109),
        ]

    def test_across_midnight_with_time_zones_and_in_any_order(self, tmp_path: Path) -> None:
        rows = "2024-03-01T00:00:01+00:00,3,1\n2024-03-01T01:59:59+02:00,7,2\n"
        found = read_workload(written(tmp_path, HEADER + rows, "t.csv"))
        assert found == [Arrival(0.0, 7, 2), Arrival(2.0, 3, 1)]

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ("yesterday,1,2", "line 3: TIMESTAMP 'yesterday' is no date and time; write 2023-11-16 18:15:46.68."),
            (
                "2023-11-16 18:15:46,x,2",
                "line 3: 'ContextTokens' is 'x'; it must be a number of tokens, at least 1.",
            ),
            ("2023-11-16 18:15:46,5,0", "line 3: 'GeneratedTokens' is 0; it must be a number of tokens, at least 1."),
            ("2023-11-16 18:15:46,5", "line 3: 'GeneratedTokens' is None; it must be a number of tokens, at least 1."),
        ],
        ids=["time", "word", "zero", "short"],
    )
    def test_a_bad_line(self, tmp_path: Path, row: str, says: str) -> None:
        path = written(tmp_path, f"{HEADER}2023-11-16 18:15:46,1,2\n{row}\n", "t.csv")
        with pytest.raises(ValueError) as refusal:
            read_workload(path)
        assert str(refusal.value) == f"{path}, {says}"

    def test_no_such_column(self, tmp_path: Path) -> None:
        path = written(tmp_path, "TIMESTAMP,ContextTokens\n", "t.csv")
        with pytest.raises(ValueError, match="has no column GeneratedTokens; its first line must name TIMESTAMP"):
            read_workload(path)


class TestJsonLines:
    def test_read(self, tmp_path: Path) -> None:
        first = '{"timestamp": 1500, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]}'
        second = '{"timestamp": 4000, "input_length": 512, "output_length": 1, "hash_ids": [7]}'
        assert read_workload(written(tmp_path, f"{first}\n\n{second}\n")) == [
            Arrival(0.0, 600, 20, (7, 8)),
            Arrival(2.5, 512, 1, (7,)),
        ]

    def test_lengths_alone_are_there_at_once(self, tmp_path: Path) -> None:
        assert read_workload(written(tmp_path, LINE + "\n" + LINE)) == [Arrival(0.0, 800, 200)] * 2

    def test_the_first_so_many_as_they_are_written(self, tmp_path: Path) -> None:
        late = '{"timestamp": 9000, "input_length": 1, "output_length": 1}'
        path = written(tmp_path, f"{LINE}\n{late}\nnot read any more\n")
        assert read_workload(path, requests=2, speed_up=4.0) == [Arrival(0.0, 800, 200), Arrival(2.25, 1, 1)]

    def test_requests_at_the_same_time_keep_their_order(self, tmp_path: Path) -> None:
        lines = "\n".join(f'{{"input_length": {n}, "output_length": 1}}' for n in (5, 3, 4))
        assert [arrival.prompt for arrival in read_workload(written(tmp_path, lines))] == [5, 3, 4]

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("{", "not valid JSON (Expecting property name enclosed in double quotes at column 2); write {"),
            ("[1]", "must be a JSON object such as {"),
            ('{"output_length": 2}', "'input_length' is None; it must be a number of tokens, at least 1."),
            ('{"input_length": true, "output_length": 2}', "'input_length' is True; it must be a number"),
            ('{"input_length": 2.5, "output_length": 2}', "'input_length' is 2.5; it must be a number"),
            ('{"input_length": 5, "output_length": 0}', "'output_length' is 0; it must be a number"),
            (
                '{"input_length": 5, "output_length": 1, "timestamp": "now"}',
                "'timestamp' is 'now'; it must be a number of milliseconds.",
            ),
            ('{"input_length": 5, "output_length": 1, "timestamp": NaN}', "'timestamp' is nan; it must be a number"),
            (
                '{"input_length": 513, "output_length": 1, "hash_ids": [1]}',
                "'hash_ids' has 1 ids, but a prompt of 513 tokens has 2 chunks of 512; give one for each",
            ),
            ('{"input_length": 5, "output_length": 1, "hash_ids": [-1]}', "'hash_ids' must be a list of numbers"),
            ('{"input_length": 5, "output_length": 1, "hash_ids": 3}', "'hash_ids' must be a list of numbers"),
        ],
    )
    def test_a_bad_line(self, tmp_path: Path, line: str, says: str) -> None:
        path = written(tmp_path, f"{LINE}\n\n{line}\n")
        with pytest.raises(ValueError) as refusal:
            read_workload(path)
        assert str(refusal.value).startswith(f"{path}, line 3: {says}")
        assert "\n" not in str(refusal.value)


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\); give a CSV"):
            read_workload(tmp_path / "none.jsonl")

    def test_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe\xff")
        with pytest.raises(ValueError, match=r"cannot be read \(it is no text\)"):
            read_workload(tmp_path / "t.jsonl")

    @pytest.mark.parametrize(("name", "text"), [("t.jsonl", "\n"), ("t.csv", HEADER)])
    def test_empty(self, tmp_path: Path, name: str, text: str) -> None:
        with pytest.raises(ValueError, match="holds no request; write one per line, such as"):
            read_workload(written(tmp_path, text, name))


ARRIVALS = [Arrival(0.0, 100, 20, (1,)), Arrival(1.0, 10, 2), Arrival(3.0, 60, 41, (5,))]


class TestWorkload:
    def test_those_that_are_too_long_are_left_out(self) -> None:
        assert within(ARRIVALS, 120) == Workload(ARRIVALS)
        found = within(ARRIVALS, 119)
        assert (found.arrivals, found.left_out) == (ARRIVALS[1:], 1)
        assert (found.prompt_tokens, found.output_tokens, found.seconds, found.shares) == (70, 43, 3.0, True)

    def test_none_fits(self) -> None:
        with pytest.raises(ValueError, match="fits into 11 tokens; the shortest takes 12, so raise --max-model-len"):
            within(ARRIVALS, 11)

    def test_fewer_at_once_are_taken_evenly(self) -> None:
        assert [one.prompt for one in Workload(ARRIVALS).at_once(2).arrivals] == [100, 10]
        assert {one.time for one in Workload(ARRIVALS).at_once(3).arrivals} == {0.0}

    def test_more_at_once_are_copies_that_share_nothing(self) -> None:
        found = Workload(ARRIVALS).at_once(7).arrivals
        assert [one.prompt for one in found] == [100, 10, 60, 100, 10, 60, 100]
        assert [one.chunks for one in found] == [(1,), (), (5,), (7,), (), (11,), (13,)]
