"""The record as one HTML file that needs nothing else: no network, no script, pictures inside."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

from .. import __version__
from ..plots.colors import BLUE, GRAY
from ..plots.live import page_size, png
from ..plots.style import Figure, footnote, heading, new_figure, style_context
from ..trace import duration_text, number_text
from ..units import amount_text, counted
from . import Attempt, Exercised, Guess, Record

SIZE = 5.0, 5.9  # inches: its text can still be read at the width of a phone
NONE = '<span class="quiet">–</span>'
STYLE = """
:root { color-scheme: light; --ink: #222; --quiet: #666; --page: #fff; --line: #ddd; --good: #1b7f3b; --mark: #eaf5ee }
@media screen and (prefers-color-scheme: dark) { :root { color-scheme: dark; --ink: #e6e6e6; --quiet: #a0a0a0;
  --page: #181818; --line: #3c3c3c; --good: #6fce8f; --mark: #1f3326 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 54rem;
  margin: 0 auto; padding: 1rem }
h1 { font-size: 1.6rem; margin: .5rem 0 } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .92rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums } tbody th { padding-top: .9rem }
.quiet, small, footer { color: var(--quiet) } .good { color: var(--good); font-weight: 600 }
.best td { background: var(--mark) } .first td { border: 0; padding-bottom: 0 } tr, figure { break-inside: avoid }
figure { margin: 1rem 0 } img { max-width: 100%; height: auto; background: #fff; border-radius: .3rem }
figcaption, footer { font-size: .85rem }
@media (max-width: 34rem) { body { padding: .7rem } table { font-size: .82rem } th, td { padding: .25rem .22rem } }
@media print { body { max-width: none; font-size: 11pt } .wide { overflow: visible } }
"""
START = "<p>Start with <code>make lab</code>, and open the notebook 00_why. Then write this page anew.</p>"


def page(record: Record, day: str) -> str:
    """Return the whole file. day: when it is written. All text of the record is escaped."""
    lost = counted(record.damaged, "line of the progress file was", "lines of the progress file were")
    begun = record.guesses or record.curves or record.attempts or any(e.tried for e in record.exercises)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What you did: hpdl_lab</title>
<style>{STYLE}</style>
</head>
<body>
<h1>What you did in the course</h1>
{"" if begun else START}
{_exercises(record)}{guesses(record)}{_curves(record)}{_race(record)}
<footer>
{f"<p>{lost} damaged and left out.</p>" if record.damaged else ""}
<p>Written by hpdl_lab {escape(__version__)} on {escape(day)}, from the progress that is kept on your machine.</p>
</footer>
</body>
</html>
"""


def _exercises(record: Record) -> str:
    """Return all exercises by notebook, and their sum."""
    all_, rows = record.exercises, []
    if not any(e.tried for e in all_):
        return _section(
            "Exercises", "You have checked no exercise yet: <code>lab.check(...)</code> below each does it."
        )
    for notebook in dict.fromkeys(e.id.partition(".")[0] for e in all_):
        own = [e for e in all_ if e.id.partition(".")[0] == notebook]
        count = f"<small>{sum(e.passed for e in own)} of {len(own)}</small>"
        rows.append(f'<tr><th colspan="6" scope="rowgroup">Notebook {int(notebook):02d} {count}</th></tr>')
        rows += map(_exercise_row, own)
    text = f"{sum(e.passed for e in all_)} of {counted(len(all_), 'exercise')} passed, with "
    text += f"{counted(sum(e.checks for e in all_), 'check')} and {counted(sum(e.hints for e in all_), 'hint')}; "
    text += f"{counted(sum(e.solution for e in all_), 'solution')} seen. Checks are counted until the exercise passes."
    return _section("Exercises", text, _table(["", "exercise", "state", "#checks", "#hints", "solution"], rows))


def _exercise_row(e: Exercised) -> str:
    state = '<span class="good">passed</span>' if e.passed else "not yet" if e.tried else NONE
    cells = [e.id, escape(e.title), state, e.checks or NONE, e.hints or NONE, "seen" if e.solution else NONE]
    return _row(cells, numbers=(3, 4))


def guesses(record: Record) -> str:
    """Return all guesses, and their picture if a truth is known."""
    title, median = "Guesses against truth", record.median_factor
    if not record.guesses:
        return _section(
            title, "You have guessed nothing yet: cells with <code>lab.guess(...)</code> wait for a number."
        )
    text = "A factor of 1 is exact; 2 is twice the truth, or half of it."
    if median:
        text = f"The median of your guesses is off by a factor of {number_text(median)}. {text}"
    drawn, picture = [g for g in record.guesses if g.guess > 0 and (g.truth or 0) > 0], ""
    if drawn and median:
        figure = scatter(drawn, f"median factor {number_text(median)}")
        alt = f"{counted(len(drawn), 'guess', 'guesses')} over the truth, on logarithmic axes, with the diagonal"
        picture = _image(png(figure), alt, page_size(figure)[0])
    known = [g for g in record.guesses if g.truth is not None]
    if rest := len(record.guesses) - len(known):
        text += f" {counted(rest, 'guess has', 'guesses have')} no truth, or not yet."
    rows = map(_guess_row, known)
    return _section(title, text, picture + (_table(["what", "#guess", "#truth", "#factor"], rows) if known else ""))


def _guess_row(g: Guess) -> str:
    cells = [escape(g.what), number(g.guess), number(g.truth or 0.0), NONE if g.factor is None else number(g.factor)]
    return _row(cells, numbers=(1, 2, 3))


def number(x: float) -> str:
    """Return three digits or all: "1,048,576"; from ten million on, with a prefix: "13.3 G"."""
    return amount_text(x, "").strip() if abs(x) >= 1e7 else number_text(x)


def scatter(guesses: Sequence[Guess], subtitle: str) -> Figure:
    """Draw guess over truth, which are positive, on logarithmic axes of the same range, with the diagonal."""
    figure = new_figure(*SIZE)
    truths, values = [g.truth or 0.0 for g in guesses], [g.guess for g in guesses]
    ends = [min(*truths, *values) / 2, max(*truths, *values) * 2]
    with style_context():
        ax = figure.subplots()
        figure.subplots_adjust(left=0.13, right=0.96, bottom=0.15, top=0.85)
        for off, line in ((0.1, ":"), (1, "-"), (10, ":")):
            ax.plot(ends, [end * off for end in ends], line, color=GRAY, linewidth=1)
        ax.plot(truths, values, "o", color=BLUE, alpha=0.65, markeredgewidth=0)
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="truth", ylabel="your guess", aspect="equal")
        heading(figure, "Your guesses against the truth", subtitle)
        footnote(figure, "line: exact; dotted: off by a factor of 10")
    return figure


def _curves(record: Record) -> str:
    """Return the figures in the order of time."""
    if not record.curves:
        return _section("Curves", "There is no figure yet: what verbs such as <code>lab.train()</code> draw is kept.")
    text = f"{counted(len(record.curves), 'figure')} in the order of time; of each kind and title, the last one."
    return _section("Curves", text, "".join(_image(c.png, c.alt, c.width, f"{c.day}: {c.alt}") for c in record.curves))


def _race(record: Record) -> str:
    """Return all attempts in their order, the best of each league marked."""
    if not record.attempts:
        return _section("The race", "You have not raced yet: <code>lab.race</code> takes a plan and an expected time.")
    rows = [_attempt_row(i, a, any(a is b for b in record.best)) for i, a in enumerate(record.attempts, 1)]
    text = "The least score is the best. The ratio is the score over the reference plan's."
    return _section("The race", text, _table(["", "league and plan", "#expected", "#took", "#score", "#ratio"], rows))


def _attempt_row(i: int, a: Attempt, best: bool) -> str:
    what = f"<b>{escape(a.league)}</b>" + ' <span class="good">best</span>' * best
    plan = escape(", ".join(f"{name} {value}" for name, value in a.plan.items() if name != "expected_s"))
    plan += "" if a.valid else f"<br><small>not valid: {escape(a.why)}</small>"
    times = [_time_of(a.expected_s), *(_time_of(t if a.valid else None) for t in (a.seconds, a.score))]
    ratio = number_text(a.score / a.reference_s) if a.valid and a.score is not None and a.reference_s else NONE
    first = _row([i, what, *times, ratio], numbers=(2, 3, 4, 5), kind="first " + "best" * best)
    return first + f"<tr{' class=best' * best}><td></td><td colspan=5>{plan}</td></tr>"


def _time_of(seconds: float | None) -> str:
    return NONE if seconds is None else duration_text(seconds)


def _image(data: bytes, alt: str, width: int, caption: str = "") -> str:
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img width="{width}" alt="{escape(alt)}" src="{source}">{below}</figure>\n'


def _section(title: str, text: str, body: str = "") -> str:
    """Return a section of text and body, which are HTML."""
    return f"<section><h2>{title}</h2><p>{text}</p>{body}</section>\n"


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table. heads: a name that begins with # stands over numbers; rows: HTML."""
    cells = "".join(f'<th class="n">{h[1:]}</th>' if h[1:] and h[0] == "#" else f"<th>{h}</th>" for h in heads)
    head = f"<thead><tr>{cells}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: Sequence[object], numbers: Sequence[int], kind: str = "") -> str:
    """Return a row of cells, which are HTML; numbers: the columns of numbers, which stand at the right."""
    columns = (f'<td class="n">{cell}</td>' if i in numbers else f"<td>{cell}</td>" for i, cell in enumerate(cells))
    return f'<tr class="{kind}">{"".join(columns)}</tr>\n'
