#!/usr/bin/env python3
"""Reads what nccl-tests (all_reduce_perf and its relatives) printed, checks it, and prints it as CSV.

Marks of mpirun in front of lines and NCCL's own log lines are passed over. The columns are those of
`deep_ep bench --csv`, so that scripts/bench_plot.py draws them. The exit status is 1 if data was wrong, if bandwidths do
not fit each other, or if the table has no end (the CSV is printed all the same), and 2 for a text without a table.
"""

import argparse
import csv
import re
import sys

# busbw / algbw of n ranks.
FACTORS = {"all_reduce": lambda n: 2 * (n - 1) / n}
FACTORS.update(dict.fromkeys(("all_gather", "reduce_scatter", "alltoall", "gather", "scatter"), lambda n: (n - 1) / n))
FACTORS.update(dict.fromkeys(("broadcast", "reduce", "sendrecv", "hypercube"), lambda n: 1))
COLUMNS = ("benchmark", "operation", "dtype", "mode", "part", "by", "device", "ranks", "bytes", "mean_us", "gb_per_s",
           "alg_gb_per_s", "note")  # fmt: skip
MARK = re.compile(r"^\[[0-9]+(,[0-9]+)?\](<std(out|err)>)?:?")  # of mpirun --tag-output
ROW_WIDTH = 13


class Refused(Exception):
    """The text is no such table."""


def number(word, place, column):
    if word == "N/A":
        return None
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", word):
        raise Refused(f"{place}: {column} is '{word}', expected a number")
    return float(word)


class Table:
    def __init__(self, line, collective, ranks):
        self.line, self.collective, self.ranks = line, collective, ranks
        self.counted = ranks != 0
        self.rows = []  # (line, bytes, type, redop, place, time, algbw, busbw, wrong)
        self.average = None
        self.out_of_bounds = False

    def add(self, words, line, place):
        size = int(number(words[0], place, "size"))
        for at, where in ((5, "out of place"), (9, "in place")):
            values = [number(words[at + i], place, name) for i, name in enumerate(("time", "algbw", "busbw", "#wrong"))]
            self.rows.append((line, size, words[2], words[3], where, *values))

    def factor(self):
        """0 where the number of ranks is not known."""
        return FACTORS[self.collective](self.ranks) if self.ranks else 0

    def guess_ranks(self):
        """How many ranks have this ratio of bandwidths: where they are largest, rounding matters least."""
        if self.counted or FACTORS[self.collective](2) == FACTORS[self.collective](4):
            return
        pairs = [(algbw, busbw) for *_, place, _, algbw, busbw, _ in self.rows if place == "out of place" and algbw and busbw]
        limit = FACTORS[self.collective](1 << 30)
        if pairs:
            algbw, busbw = max(pairs)
            ranks = limit / (limit - busbw / algbw) if busbw / algbw < limit else 0
            self.ranks = round(ranks) if 2 <= ranks < 1 << 20 else 0


def parse(text, name, collective="", ranks=0, allow_partial=False):
    """The tables of `text`."""
    tables, named, listed, cut, inside = [], "all_reduce", 0, "", False
    line = 0
    for line, content in enumerate(text.splitlines(), 1):
        content, place = MARK.sub("", content), f"{name} line {line}"
        if re.match(r"\s*#\s*size\s+count\s+type\b", content):
            tables.append(Table(line, collective or named, ranks or listed))
            inside, listed = True, 0
            continue
        found = re.search(r"\b([a-z_]+)_perf\b", content)
        if found and found[1] in FACTORS:
            named = found[1]
        listed += bool(re.match(r"\s*#\s+Rank\s+[0-9]+\b", content))
        words = content.split()
        if not inside or not words or " NCCL " in content:
            continue
        if words[0].startswith("#"):
            if "Out of bounds" in content:
                tables[-1].out_of_bounds = "OK" not in content
            found = re.search(r"Avg bus bandwidth\s*:\s*(\S+)", content)
            if found:
                tables[-1].average = number(found[1], place, "the average bus bandwidth")
                inside = False
            continue
        if cut:
            raise Refused(cut)
        if len(words) != ROW_WIDTH:
            cut = f"{place}: '{content[:60]}' is no row of nccl-tests' table: {len(words)} columns, expected {ROW_WIDTH}"
            if not allow_partial or len(words) > ROW_WIDTH:  # the last row of a text that was cut may be short
                raise Refused(cut)
            continue
        tables[-1].add(words, line, place)
    if not tables:
        raise Refused(f"{name}: there is no table of nccl-tests in its {line} lines (its head begins with '# size count type')")
    for table in tables:
        table.guess_ranks()
    return tables


def mistakes_in(table, name, allow_partial=False):
    """A sentence for everything that is wrong."""
    if not table.rows:
        return [f"{name} line {table.line}: the table has no rows"]
    mistakes, factor, rates = [], table.factor(), []
    for line, _, _, _, place, _, algbw, busbw, wrong in table.rows:
        if busbw is None or algbw is None:
            continue
        rates.append(busbw)
        if wrong:
            mistakes.append(f"{name} line {line}: {wrong:g} wrong values {place}")
        # Both are printed with two digits behind the point.
        if factor and abs(busbw - algbw * factor) > 0.01 * busbw + 0.006 * (1 + factor):
            mistakes.append(
                f"{name} line {line}: busbw {busbw:g} {place} does not fit algbw {algbw:g}: {table.collective} of "
                f"{table.ranks} ranks has {factor:.4g} times that (--collective, --ranks?)"
            )
    if table.out_of_bounds:
        mistakes.append(f"{name}: nccl-tests itself reports values out of bounds")
    mean = sum(rates) / len(rates) if rates else 0
    if table.average is None:
        if not allow_partial:
            mistakes.append(
                f"{name}: the table that begins at line {table.line} has no line '# Avg bus bandwidth': the run was cut "
                "short, or the text is (--allow-partial takes it)"
            )
    elif abs(table.average - mean) > 0.02 * mean + 0.01:
        mistakes.append(
            f"{name}: the average bus bandwidth is {table.average:g} there, but {mean:.4g} of the {len(table.rows) // 2} "
            "rows: rows are missing"
        )
    return mistakes


def summary(table, name):
    rates = [row[7] for row in table.rows if row[7] is not None]
    guessed = not table.counted and table.ranks
    checked = any(row[8] is not None for row in table.rows)
    return (
        f"{name}: {table.collective} of {table.ranks or '?'} ranks{' (by the bandwidths)' if guessed else ''}, "
        f"{len(table.rows) // 2} sizes; bus bandwidth at most {max(rates, default=0):.2f} GB/s, average "
        f"{'not there' if table.average is None else f'{table.average:g} GB/s'}; "
        f"{'data checked' if checked else 'data not checked (#wrong is N/A)'}"
    )


def csv_rows(table):
    def text(value):
        return "" if value is None else f"{value:.6g}"

    for _, size, dtype, redop, place, time, algbw, busbw, wrong in table.rows:
        yield ("nccl", table.collective, dtype, place, "-" if redop == "none" else redop, "NCCL", "cuda", table.ranks or "",
               size, text(time), text(busbw), text(algbw), "data not checked" if wrong is None else "")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the output of all_reduce_perf, say; - for standard input")
    parser.add_argument("--ranks", type=int, default=0, help="where the text does not list them")
    parser.add_argument("--collective", default="", choices=sorted(FACTORS), help="where the text does not name it")
    parser.add_argument("--allow-partial", action="store_true", help="take a table without its last lines")
    arguments = parser.parse_args()
    if arguments.ranks < 0 or arguments.ranks == 1:
        parser.error(f"--ranks {arguments.ranks}: allowed: 2 or more")
    name = "standard input" if arguments.file == "-" else arguments.file
    try:
        with sys.stdin if arguments.file == "-" else open(arguments.file, encoding="utf-8", errors="replace") as file:
            tables = parse(file.read(), name, arguments.collective, arguments.ranks, arguments.allow_partial)
    except (OSError, Refused) as error:
        print(f"nccl_table: {error}", file=sys.stderr)
        return 2
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    mistakes = []
    for table in tables:
        writer.writerows(csv_rows(table))
        mistakes += mistakes_in(table, name, arguments.allow_partial)
    sys.stdout.flush()
    for line in [summary(table, name) for table in tables] + mistakes:
        print(line, file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
