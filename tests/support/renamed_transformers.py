"""transformers as a later version might be: its modeling files rewritten while they are imported.

Keywords inside a model are not public, and versions rename them: 5.24 made `cache` of `past_key_values`. Here they get names that no
version has, so that only code passes that never spells them. [`install`] comes before the first import of a modeling file.

What is rewritten is the syntax tree; line numbers stay those of the file. A file in which something is not found that should be
rewritten is an error, so that no test passes because nothing was changed.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections import Counter


# What the versions call it, and what it is called here.
CACHE = {
    "past_key_values": "memory_bank",
    "cache": "memory_bank",
    "past_key_values_length": "memory_bank_length",
    "cache_length": "memory_bank_length",
}
MASKS = {"attention_mask": "pair_mask", "encoder_attention_mask": "encoder_pair_mask"}
# A keyword that the base model hands down from module to module, and the constant of each file that arrives there.
EXTRA, CONSTANT = "sequence_layout", "SEQUENCE_LAYOUT"

DECODERS = ("bert", "roberta", "xlm_roberta", "camembert", "electra")
ENCODERS = ("distilbert", "mpnet", "deberta", "deberta_v2")
MODELING = {f"transformers.models.{name}.modeling_{name}": name for name in (*DECODERS, *ENCODERS)}
OUTPUTS = "transformers.modeling_outputs"
# How far the new names reach; "strict" has the version's own names, and none of those that it only accepts for a while.
KINDS = ("inside", "public", "strict")

# The rewritten files, with how often each thing was done.
rewritten: dict[str, Counter] = {}


def install(kind: str) -> None:
    """Rewrite what is imported from now on.

    Args:
        kind: "inside" renames what the modules below a base model are called with, "public" the cache of base models, heads
            and outputs too. Both hand an extra keyword down and put optional parameters in another order. "strict" takes
            away the decorators that accept deprecated names.
    """
    assert kind in KINDS, kind
    assert not sys.modules.keys() & {*MODELING, OUTPUTS}, "transformers' files are imported already"
    sys.meta_path.insert(0, Finder(kind))


def check_all_rewritten(kind: str) -> None:
    """Raise AssertionError where a file was imported as it is, or not at all."""
    files = {*MODELING} | ({OUTPUTS} if kind == "public" else set())
    assert files == rewritten.keys(), files ^ rewritten.keys()


class Finder:
    """Finds the files to be rewritten where Python finds them."""

    def __init__(self, kind: str):
        self.kind = kind

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname not in MODELING and not (fullname == OUTPUTS and self.kind == "public"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(fullname, spec.origin, self.kind)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a rewritten file, past Python's cache of compiled ones."""

    def __init__(self, fullname: str, path: str, kind: str):
        super().__init__(fullname, path)
        self.kind = kind

    def get_code(self, fullname: str):
        tree = ast.parse(importlib.util.decode_source(self.get_data(self.path)))
        if fullname == OUTPUTS:
            rewriter, expected = OutputRewriter(), {"cache"}
        else:
            rewriter = Rewriter(tree, self.kind)
            expected = expected_in(tree, MODELING[fullname], self.kind)
        tree = ast.fix_missing_locations(rewriter.visit(tree))
        missing = expected - rewriter.done.keys()
        assert not missing, f"nothing to rewrite in {fullname} for {missing}"
        rewritten[fullname] = rewriter.done
        return compile(tree, self.path, "exec", dont_inherit=True)


def expected_in(tree: ast.Module, family: str, kind: str) -> set[str]:
    """What must be done in a family's file."""
    if kind == "strict":
        # Nothing, where a version accepts no deprecated names.
        return {"decorators"} & {"decorators" for node in ast.walk(tree) if is_deprecation(node)}
    expected = {"attention_mask", "reordered", "extra parameters", "extra arguments"}
    return expected | ({"encoder_attention_mask", "cache", "length"} if family in DECODERS else set())


def is_deprecation(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deprecate_kwarg"


class Renaming(ast.NodeTransformer):
    """Counts what is done."""

    def __init__(self):
        self.done = Counter()

    def renamed(self, name: str, names: dict[str, str]) -> str:
        if name not in names:
            return name
        roles = {"memory_bank": "cache", "memory_bank_length": "length"}
        self.done[roles.get(names[name], name)] += 1
        return names[name]


class OutputRewriter(Renaming):
    """Renames the field of the cache in all output classes."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if isinstance(node.target, ast.Name):
            node.target.id = self.renamed(node.target.id, CACHE)
        return node


class Rewriter(Renaming):
    """Rewrites a family's modeling file.

    Its classes are models (base model and heads), whose keywords are public, and the modules that they are made of. What is
    imported keeps the names of its parameters, but for the output classes where they are rewritten too.
    """

    def __init__(self, tree: ast.Module, kind: str):
        super().__init__()
        self.kind = kind
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        self.imported = {alias.name for node in imports for alias in node.names}
        if kind == "public":
            self.imported -= {a.name for node in imports if node.module == "modeling_outputs" for a in node.names}
        self.models = {node.name for node in classes for base in node.bases if "PreTrainedModel" in ast.unparse(base)}
        forwards = {node.name: method for node in classes for method in node.body if is_forward(method)}
        # The parameters of each module as the file has them, `self` left out.
        self.signatures = {name: parameters(f) for name, f in forwards.items() if name not in self.models}
        self.optional = {name: names_of_optional(forwards[name]) for name in self.signatures}
        self.takes_mask = {name for name, names in self.signatures.items() if "attention_mask" in names}
        # Of the class, and of the function, that is visited: what names mean, and which modules a callee may be.
        self.names: dict[str, str] = {}
        self.parts: dict[str, set[str]] = {}
        self.loops: dict[str, str] = {}
        self.in_model = False

    @property
    def changes_modules(self) -> bool:
        return self.kind != "strict"

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        self.generic_visit(tree)
        tree.body += ast.parse(f"{CONSTANT} = object()").body
        return tree

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.in_model = node.name in self.models
        if self.in_model:
            self.names = CACHE if self.kind == "public" else {}
        elif node.name in self.signatures:
            self.names = CACHE | MASKS if self.changes_modules else {}
        self.parts = parts_of(node, set(self.signatures))
        self.current = node.name
        self.generic_visit(node)
        self.names, self.parts, self.in_model = {}, {}, False
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        refused = {*self.names} - {"cache_length", "past_key_values_length"}
        for decorator in [d for d in node.decorator_list if is_deprecation(d)]:
            node.decorator_list.remove(decorator)
            refused |= {decorator.args[0].value}
            self.done["decorators"] += 1
        self.loops = loops_of(node)
        self.generic_visit(node)
        if is_forward(node) and (self.names or refused):
            self._rewrite_forward(node, refused)
        elif node.name == "eager_attention_forward" and self.changes_modules:
            self._take_extra(node)
        return node

    def _rewrite_forward(self, node: ast.FunctionDef, refused: set[str]) -> None:
        if not self.in_model and self.changes_modules:
            reorder_optional(node.args)
            self.done["reordered"] += len(self.optional[self.current]) > 1
            if self.current in self.takes_mask:
                self._take_extra(node)
        if node.args.kwarg is not None:
            # A name that is not known any more would travel down among the keywords, and nobody would miss it.
            kwargs = node.args.kwarg.arg
            insert(node, f"assert not {kwargs}.keys() & {refused!r}, [*{kwargs}]")

    def _take_extra(self, node: ast.FunctionDef) -> None:
        """It must be given, and be what the base model gave."""
        node.args.kwonlyargs.append(ast.arg(EXTRA))
        node.args.kw_defaults.append(None)
        insert(node, f"assert {EXTRA} is {CONSTANT}")
        self.done["extra parameters"] += 1

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.renamed(node.arg, self.names)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.renamed(node.id, self.names)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if self.in_model:  # of an output
            node.attr = self.renamed(node.attr, self.names)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        called = self._modules_called(node.func)
        name = node.func.id if isinstance(node.func, ast.Name) else None
        self.generic_visit(node)
        if called and self.changes_modules:
            self._name_optional(node, called)
            self._rename_keywords(node, CACHE | MASKS)
            if called & self.takes_mask:
                self._give_extra(node)
        elif name == "attention_interface" and self.changes_modules:
            self._give_extra(node)
        elif name not in self.imported:
            self._rename_keywords(node, self.names)
        return node

    def _modules_called(self, callee: ast.expr) -> set[str]:
        """The modules that `self.part(...)`, or the variable of a loop over `self.part`, may be."""
        if isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name) and callee.value.id == "self":
            return self.parts.get(callee.attr, set())
        if isinstance(callee, ast.Name):
            return self.parts.get(self.loops.get(callee.id), set())
        return set()

    def _name_optional(self, node: ast.Call, called: set[str]) -> None:
        """Positional arguments for optional parameters become keywords, since those change their places."""
        [names] = {tuple(self.signatures[name][: len(node.args)]) for name in called}
        optional = set.intersection(*(self.optional[name] for name in called))
        first = next((i for i, name in enumerate(names) if name in optional), len(names))
        node.keywords[:0] = [ast.keyword(name, value) for name, value in zip(names[first:], node.args[first:])]
        del node.args[first:]

    def _rename_keywords(self, node: ast.Call, names: dict[str, str]) -> None:
        for keyword in node.keywords:
            if keyword.arg is not None:
                keyword.arg = self.renamed(keyword.arg, names)

    def _give_extra(self, node: ast.Call) -> None:
        value = CONSTANT if self.in_model else EXTRA
        node.keywords.append(ast.keyword(EXTRA, ast.Name(value, ast.Load())))
        self.done["extra arguments"] += 1


def is_forward(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "forward"


def parameters(forward: ast.FunctionDef) -> list[str]:
    """The names of its positional parameters, `self` left out."""
    return [argument.arg for argument in forward.args.args[1:]]


def names_of_optional(forward: ast.FunctionDef) -> set[str]:
    names = parameters(forward)
    return set(names[len(names) - len(forward.args.defaults) :])


def reorder_optional(arguments: ast.arguments) -> None:
    """The optional parameters of a function, backwards."""
    start = len(arguments.args) - len(arguments.defaults)
    arguments.args[start:] = reversed(arguments.args[start:])
    arguments.defaults.reverse()


def insert(function: ast.FunctionDef, statement: str) -> None:
    """Put a statement before all others, behind the docstring."""
    place = 0 if ast.get_docstring(function) is None else 1
    function.body[place:place] = ast.parse(statement).body


def parts_of(node: ast.ClassDef, modules: set[str]) -> dict[str, set[str]]:
    """The attributes of a class that are modules of the file, or lists of such, and what they may be."""
    values: dict[str, set[str]] = {}
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            names = {name.id for name in ast.walk(statement.value) if isinstance(name, ast.Name)}
            # A local name stands for what it was given before: attention_class = A if ... else B
            names |= set().union(*(values.get(name, set()) for name in names))
            values.setdefault(ast.unparse(statement.targets[0]), set()).update(names)
    found = {target.removeprefix("self."): names & modules for target, names in values.items() if "self." in target}
    return {attribute: classes for attribute, classes in found.items() if classes}


def loops_of(function: ast.FunctionDef) -> dict[str, str]:
    """The variables of loops over `self.part`, also by `enumerate`, and the part."""
    found = {}
    for loop in ast.walk(function):
        if isinstance(loop, ast.For):
            over = [n.attr for n in ast.walk(loop.iter) if isinstance(n, ast.Attribute)]
            found |= {n.id: over[0] for n in ast.walk(loop.target) if isinstance(n, ast.Name) and over}
    return found
