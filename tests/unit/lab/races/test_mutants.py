"""The script that breaks waits: what it deletes, and how it finds a mutant again."""

from lab.races.mutants import __main__ as script
from lab.races.mutants import edits, waits
from lab.races.mutants.mutant import SourceFile

SOURCE = """
class A:
    def f(self, first, launch):
        first.wait()
        axis.all_gather(own, out=parts).wait()
        with self._stream.context():
            out.copy_(source)
        self.copied = self._stream.device_handle()
        self._flush(é, stream=side)
        barrier.wait("purpose")
        number = thread.wait()
        return Handle(first.wait, lambda: source, lambda: launch().wait(), dist.all_reduce(out).wait, self.sum)

    def g(self, first, launch):
        first.wait()
        first.wait()
        return first.then(launch)
"""
WITHOUT_A_WAIT = [
    ("A.f", "first.wait()", "None"),
    ("A.f", "axis.all_gather(own, out=parts).wait()", "axis.all_gather(own, out=parts)"),
    ("A.f", "self._stream.context()", waits.NO_CONTEXT),
    ("A.f", "self._stream.device_handle()", waits.NO_HANDLE),
    ("A.f", "stream=side", ""),
    ("A.f", "first.wait", "lambda: None"),
    ("A.f", "lambda: source", "lambda: None"),
    ("A.f", "launch().wait()", "launch()"),
    ("A.f", "dist.all_reduce(out).wait", "(dist.all_reduce(out), lambda: None)[1]"),
    ("A.g", "first.wait()", "None"),
    ("A.g", "first.wait()", "None"),
    ("A.g", "first.then(launch)", "(launch)()"),
]


def test_each_wait_is_deleted_by_itself_and_what_it_waits_for_is_still_launched():
    mutants = sorted(waits.mutants(SourceFile("a.py", SOURCE)), key=lambda mutant: mutant.start)
    assert [(m.function, m.deleted, m.replacement) for m in mutants] == WITHOUT_A_WAIT
    for mutant in mutants:
        broken = mutant.apply(SOURCE)
        compile(broken, "a.py", "exec")
        assert SOURCE.count(mutant.deleted) == broken.count(mutant.deleted) + (mutant.deleted not in mutant.replacement)


def test_a_mutant_keeps_its_key_if_lines_move():
    moved = SOURCE.replace("class A:", "x = 1\n\n\nclass A:")
    found = [{script.key(m) for m in waits.mutants(SourceFile("a.py", source))} for source in (SOURCE, moved)]
    assert found[0] == found[1]
    assert len(found[0]) == len(WITHOUT_A_WAIT)


def test_every_mutant_that_is_listed_as_equivalent_exists():
    assert script.stale_equivalents(script.equivalents(script.EQUIVALENT)) == []
    assert script.stale_equivalents([("gpt/build/loss_guard.py", "LossGuard.judge", "nothing", 0)])


def test_the_tests_of_every_detector_exist():
    groups = [*waits.DETECTORS.values(), *edits.WIDE.values()]
    assert all((script.ROOT / test.split("::")[0]).exists() for tests in groups for test in tests)


EDITED = '''
class A:
    """1 < 2."""

    size: Literal[3] = 4

    def f(self, a: int | None = None) -> Literal[5]:
        if a < min(self.b, -7) and not self.c:
            raise ValueError(f"{a + 1} is below {self.b}" + str(8))
        self.d(0.5)
        self.e[a] = "x" + a
        e = a // 2
        return e

    def __repr__(self):
        return str(1 + 1)


if TYPE_CHECKING:
    x = 1
'''
EDITS = [
    ("4", "(5)"),
    ("a < min(self.b, -7) and not self.c", "(a < min(self.b, -7) or not self.c)"),
    ("a < min(self.b, -7) and not self.c", "(not (a < min(self.b, -7) and (not self.c)))"),
    ("a < min(self.b, -7)", "(a <= min(self.b, -7))"),
    ("min", "(max)"),
    ("7", "(8)"),
    ("not self.c", "(self.c)"),
    ('raise ValueError(f"{a + 1} is below {self.b}" + str(8))', "pass"),
    ("self.d(0.5)", "pass"),
    ("0.5", "(2.0)"),
    ('self.e[a] = "x" + a', "pass"),
    ("a // 2", "(a * 2)"),
    ("2", "(3)"),
    ("e", "None"),
]


def test_each_edit_is_made_by_itself_and_texts_and_annotations_stay():
    mutants = sorted(edits.mutants(SourceFile("a.py", EDITED)), key=lambda mutant: mutant.start)
    assert sorted((m.deleted, m.replacement) for m in mutants) == sorted(EDITS)
    for mutant in mutants:
        broken = mutant.apply(EDITED)
        compile(broken, "a.py", "exec")
        assert broken != EDITED
    assert len({script.key(mutant) for mutant in mutants}) == len(EDITS)


def test_an_edit_is_shown_to_the_tests_that_name_it_then_to_those_of_its_folder():
    source = SourceFile("gpt/build/loss_guard.py", "class SpikeDetector:\n    def judge(self):\n        f()")
    mutant, *_ = edits.mutants(source)
    groups = edits.detectors(mutant)
    assert groups["near"][0] == "tests/unit/gpt/build/test_loss_guard.py"
    assert "tests/distributed/gpt/test_loss_guard.py" in groups["near"]
    assert "tests/unit/gpt/settings/test_schedule.py" in groups["folder"]
    assert list(groups) == ["near", "folder", "package", "suite"]
