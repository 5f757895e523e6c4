"""Rules that the code must keep, read from its syntax tree: nothing here runs what it judges."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}


def dotted(node: ast.expr) -> str:
    """The dotted name of an expression, such as "torch.load"; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword; None if it is not given."""
    for item in call.keywords:
        if item.arg == name:
            return item.value.value if isinstance(item.value, ast.Constant) else ...
    return None


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "__import__",
            "import_module",
            "importlib.import_module",
        ):
            first = node.args[0] if node.args else None
            yield node.lineno, first.value if isinstance(first, ast.Constant) else "?"


def forbidden_imports(tree: ast.AST) -> Iterator[str]:
    """No module that runs code on loading data; nothing renamed out of sight."""
    for line, name in imported(tree):
        if FORBIDDEN_MODULES & set(str(name).split(".")):
            yield f"{line}: imports {name}"
        if name in ("torch.load", "yaml.load", "numpy.load", "builtins.eval", "builtins.exec"):
            yield f"{line}: imports the name {name}; call it with its module"


def forbidden_calls(tree: ast.AST) -> Iterator[str]:
    """No call that runs data as code, loads pickles, or starts a shell or a daemon."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in ("eval", "exec", "compile", "builtins.eval", "builtins.exec", "os.system"):
                yield f"{node.lineno}: calls {name}"
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
                yield f"{node.lineno}: calls {name}; use yaml.safe_load"
            if name == "torch.load" and keyword(node, "weights_only") is not True:
                yield f"{node.lineno}: torch.load without weights_only=True"
            for setting in ("allow_pickle", "daemon", "shell"):
                if keyword(node, setting) not in (None, False):
                    yield f"{node.lineno}: {setting} is not False"
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "daemon":
                    yield f"{node.lineno}: sets daemon"


def undocumented(tree: ast.AST) -> Iterator[str]:
    """Every module, public class and public function says what it does."""

    def visit(node: ast.AST, inside: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_"):
                    continue
                if not ast.get_docstring(child) and not is_overload(child):
                    yield f"{child.lineno}: {inside}{child.name} has no docstring"
                if isinstance(child, ast.ClassDef):
                    yield from visit(child, f"{child.name}.")

    if not ast.get_docstring(tree):  # type: ignore[arg-type]
        yield "1: the module has no docstring"
    yield from visit(tree, "")


def is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {dotted(item) for item in node.decorator_list}
    return bool(names & {"overload", "typing.overload"})


RULES: list[Callable[[ast.AST], Iterator[str]]] = [forbidden_imports, forbidden_calls, undocumented]


def test_there_is_something_to_judge() -> None:
    assert len(FILES) > 20
    assert SOURCE / "penstock" / "core" / "files.py" in FILES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Callable[[ast.AST], Iterator[str]]) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{problem}"
        for path in FILES
        for problem in rule(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as innocent",
        "from pickle import loads",
        "from multiprocessing import shelve",
        "import torch.serialization.pickle",
        "def f():\n    import marshal",
        "__import__('pickle')",
        "importlib.import_module('cloudpickle')",
        "from torch import load",
        "eval(x)",
        "exec('1')",
        "compile(x, y, 'exec')",
        "yaml.load(f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "Thread(target=f, daemon=True)",
        "thread.daemon = True",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
    ],
)
def test_the_gate_sees(code: str) -> None:
    tree = ast.parse(code)
    assert [*forbidden_imports(tree), *forbidden_calls(tree)]


@pytest.mark.parametrize(
    "code",
    [
        "import json",
        "re.compile(x)",
        "yaml.safe_load(f)",
        "torch.load(f, weights_only=True)",
        "torch.load(f, map_location='cpu', weights_only=True)",
        "np.load(f, allow_pickle=False)",
        "Thread(target=f, daemon=False)",
        "model.eval()",
        "model.compile()",
        "subprocess.run(['ls'])",
    ],
)
def test_the_gate_lets_pass(code: str) -> None:
    tree = ast.parse(code)
    assert not [*forbidden_imports(tree), *forbidden_calls(tree)]


def test_the_gate_sees_a_missing_docstring() -> None:
    bare = '"""M."""\nclass A:\n    """A."""\n    def f(self): pass\n    def _g(self): pass\n'
    assert list(undocumented(ast.parse(bare))) == ["4: A.f has no docstring"]


def modules_below(package: str) -> list[str]:
    folder = SOURCE / Path(*package.split("."))
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found.append(name.removesuffix(".__init__"))
    return found


@pytest.mark.parametrize(
    "modules",
    [["penstock"], ["penstock.cli"], ["penstock.errors"], modules_below("penstock.core")],
    ids=lambda modules: modules[-1],
)
def test_torch_is_left_out(modules: list[str]) -> None:
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
heavy = {{"torch", "torchrl", "tensordict"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
