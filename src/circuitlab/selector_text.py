"""The text form of selectors: a small grammar, and the writer that inverts it.

`a5-9.*<q> & |score|>0.01` reads: edges into the query input of any head of layers 5 to
9, whose score exceeds 0.01 in magnitude. docs/selection.md has the whole language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

import lark
from lark.exceptions import UnexpectedInput, VisitError

from circuitlab.errors import ArgumentError, CircuitlabError
from circuitlab.patterns import Bound, EdgePattern, End, Numbers, Span, refuse
from circuitlab.select import EdgeSelector, SiteSelector
from circuitlab.sites import PORTS

GRAMMAR = r"""
edges: edge_clause ("&" edge_clause)*
?edge_clause: edge_test | edge_pins | "!" edge_test -> without_edges
    | "!" "(" edges ")" -> without_all
?edge_test: names | end_words | end_numbers | shared
names: name ("," name)* | NONE
name: end (_ARROW end)?
?end: "*" ports? -> any_end
    | FIXED -> fixed_end
    | "m" numbers -> mlp_end
    | "a" numbers [heads] [ports] -> attention_end
heads: _OF_HEAD numbers -> head | _OF_KV numbers -> kv | _OF_ANY -> any_head
numbers: "*" | _item | "[" _item ("," _item)* "]"
ports: "<" PORT ("," PORT)* ">"
end_words: END_KIND "=" (KIND ("," KIND)* | NONE) -> words
end_numbers: END_NUMBER "=" (_item ("," _item)* | NONE) -> items
edge_pins: PIN "=" name ("," name)*

sites: site_clause ("&" site_clause)*
?site_clause: site_test | site_pins | "!" site_test -> without_sites
    | "!" "(" sites ")" -> without_all
?site_test: globs | site_words | site_numbers | shared
globs: _glob ("," _glob)* | NONE
_glob: GLOB | QUOTED
site_words: SITE_KIND "=" (WORD ("," WORD)* | NONE) -> words
site_numbers: SITE_NUMBER "=" (_item ("," _item)* | NONE) -> items
site_pins: PIN "=" _glob ("," _glob)*

?shared: PORT_KEY "=" (IN_PORT ("," IN_PORT)* | NONE) -> words
    | STATUS_KEY "=" (STATUS ("," STATUS)* | NONE) -> words
    | POSITION_KEY "=" (_item ("," _item)* | NONE) -> items
    | SIGN_KEY "=" SIGN -> sign
    | QUANTITY OP NUMBER -> bound
_item: RANGE | SLICE | INT

END_KIND.3: /((sender|receiver)\.)?kind(?=\s*=)/
END_NUMBER.3: /((sender|receiver)\.)?(layer|head)(?=\s*=)/
SITE_KIND.3: /kind(?=\s*=)/
SITE_NUMBER.3: /(layer|head)(?=\s*=)/
PORT_KEY.3: /port(?=\s*=)/
STATUS_KEY.3: /status(?=\s*=)/
POSITION_KEY.3: /position(?=\s*=)/
SIGN_KEY.3: /sign(?=\s*=)/
PIN.3: /pin(?=\s*=)/
QUANTITY.3: /(\|score\||score|support|stderr|n)(?=\s*[<>=!])/
NONE.2: /none(?![\w.*])/
_ARROW: "->"
_OF_HEAD: ".h"
_OF_KV: ".kv"
_OF_ANY: ".*"
FIXED: "input" | "logits"
KIND: "input" | "head" | "kv" | "attention" | "mlp" | "logits"
PORT: "q" | "k" | "v"
IN_PORT: "q" | "k" | "v" | "in"
STATUS: /[a-z_]+/
SIGN: "+" | "-"
OP: ">=" | "<=" | "!=" | ">" | "<" | "="
NUMBER: /[+-]?(inf|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?)/
RANGE.3: /\d+-\d+/
SLICE.2: /(-?\d+)?:(-?\d+)?(:(-?\d+)?)?/
INT: /-?\d+/
GLOB: /[A-Za-z_*][\w.*]*/
QUOTED: /"(\\.|[^"\\])*"/
WORD: /\w+/
%ignore /\s+/
"""


def read_edge_selector(text: str) -> EdgeSelector:
    """Read an edge selector. Raises ArgumentError `selector_syntax`."""
    return _read(text, "edges") if text.strip() else EdgeSelector()


def read_site_selector(text: str) -> SiteSelector:
    """Read a site selector. Raises ArgumentError `selector_syntax`."""
    return _read(text, "sites") if text.strip() else SiteSelector()


def _read(text: str, start: str) -> Any:
    try:
        return _parser().parse(text, start=start)
    except UnexpectedInput as error:
        _refuse_syntax(text, error)
    except VisitError as error:
        if isinstance(error.orig_exc, CircuitlabError):
            raise error.orig_exc from None
        raise


@lru_cache(maxsize=1)
def _parser() -> lark.Lark:
    return lark.Lark(
        GRAMMAR,
        parser="lalr",
        start=["edges", "sites"],
        transformer=_Reader(),
        maybe_placeholders=True,
    )


def _refuse_syntax(text: str, error: UnexpectedInput) -> NoReturn:
    found = getattr(error, "pos_in_stream", None)
    ended = getattr(getattr(error, "token", None), "type", None) == "$END"
    position = len(text) if ended or found is None or found < 0 else found
    expected = getattr(error, "accepts", None) or getattr(error, "allowed", None) or ()
    shown = sorted({_SHOWN.get(str(name), str(name).lower()) for name in expected})
    raise ArgumentError(
        "selector_syntax",
        f"the selector stops making sense at character {position + 1}\n"
        f"  {text}\n  {' ' * position}^\n"
        f"expected here: {', '.join(shown) or 'the end'}",
        value=text,
        position=position,
        expected=shown,
    )


_SHOWN = {
    "$END": "the end",
    "AMPERSAND": "&",
    "BANG": "!",
    "COMMA": ",",
    "RPAR": ")",
    "LPAR": "(",
    "STAR": "*",
    "LSQB": "[",
    "RSQB": "]",
    "LESSTHAN": "<",
    "MORETHAN": ">",
    "EQUAL": "=",
    "A": "a5.h1",
    "M": "m5",
    "FIXED": "input, logits",
    "INT": "a number",
    "RANGE": "3-5",
    "SLICE": "-2:",
    "GLOB": "a site",
    "QUOTED": '"a site"',
    "END_KIND": "kind=",
    "END_NUMBER": "layer=, head=",
    "SITE_KIND": "kind=",
    "SITE_NUMBER": "layer=, head=",
    "PORT_KEY": "port=",
    "STATUS_KEY": "status=",
    "POSITION_KEY": "position=",
    "SIGN_KEY": "sign=",
    "PIN": "pin=",
    "QUANTITY": "score, |score|, support, stderr, n",
    "PORT": "q, k, v",
    "IN_PORT": "q, k, v, in",
    "KIND": "head, kv, mlp, attention, input, logits",
    "SIGN": "+, -",
    "OP": "> >= < <= = !=",
    "_ARROW": "->",
    "_OF_HEAD": ".h3",
    "_OF_KV": ".kv3",
    "_OF_ANY": ".*",
    "NUMBER": "a number",
}

_FIELDS = {
    "sender.kind": "sender_kinds",
    "sender.layer": "sender_layers",
    "sender.head": "sender_heads",
    "receiver.kind": "receiver_kinds",
    "receiver.layer": "receiver_layers",
    "receiver.head": "receiver_heads",
    "port": "ports",
    "position": "positions",
    "status": "statuses",
}


def _field(key: lark.Token) -> str:
    """The field that a key names. Bare ones mean the receiver, on an edge."""
    if key.type in ("SITE_KIND", "SITE_NUMBER"):
        return f"{key}s"
    found = _FIELDS.get(key)
    return found or _FIELDS[f"receiver.{key}"]


def _collected(clauses: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Clauses as fields. Bounds, excludes and pins may come several times."""
    found: dict[str, Any] = {"bounds": (), "exclude": (), "pinned": frozenset()}
    for field, value in clauses:
        if field in ("bounds", "exclude"):
            found[field] = (*found[field], value)
        elif field == "pinned":
            found[field] |= value
        elif field in found:
            raise ArgumentError(
                "selector_syntax",
                f"{field.replace('_', ' ')} are given twice; write alternatives as a list "
                "with commas",
                value=field,
            )
        else:
            found[field] = value
    return found


class _Reader(lark.Transformer):
    """Turns matched rules into (field, value) pairs, and those into a selector."""

    def edges(self, clauses: list[tuple[str, Any]]) -> EdgeSelector:
        return EdgeSelector(**_collected(clauses))

    def sites(self, clauses: list[tuple[str, Any]]) -> SiteSelector:
        return SiteSelector(**_collected(clauses))

    def without_edges(self, clauses: list[tuple[str, Any]]) -> tuple[str, Any]:
        return "exclude", self.edges(clauses)

    def without_sites(self, clauses: list[tuple[str, Any]]) -> tuple[str, Any]:
        return "exclude", self.sites(clauses)

    def without_all(self, selectors: list[Any]) -> tuple[str, Any]:
        return "exclude", selectors[0]

    def names(self, parts: list[Any]) -> tuple[str, Any]:
        return "names", tuple(part for part in parts if isinstance(part, EdgePattern))

    def name(self, ends: list[End]) -> EdgePattern:
        return EdgePattern(*ends) if len(ends) == 2 else EdgePattern(End(), ends[0])

    def any_end(self, parts: list[Any]) -> End:
        return End("*", ports=parts[0] if parts else None)

    def fixed_end(self, parts: list[Any]) -> End:
        return End(str(parts[0]))

    def mlp_end(self, parts: list[Any]) -> End:
        return End("mlp", parts[0])

    def attention_end(self, parts: list[Any]) -> End:
        layers, which, ports = parts
        form, heads = which or ("attention", None)
        return End(form, layers, heads, ports)

    def head(self, parts: list[Any]) -> tuple[str, Numbers | None]:
        return "head", parts[0]

    def kv(self, parts: list[Any]) -> tuple[str, Numbers | None]:
        return "kv", parts[0]

    def any_head(self, parts: list[Any]) -> tuple[str, None]:
        return "a*", None

    def numbers(self, parts: list[Any]) -> Numbers | None:
        return _items(parts) or None

    def ports(self, parts: list[Any]) -> frozenset[str]:
        return frozenset(map(str, parts))

    def words(self, parts: list[Any]) -> tuple[str, Any]:
        key, *words = parts
        found = [str(word) for word in words if word.type != "NONE"]
        return _field(key), frozenset(found)

    def items(self, parts: list[Any]) -> tuple[str, Any]:
        key, *items = parts
        return _field(key), _items(items)

    def sign(self, parts: list[Any]) -> tuple[str, str]:
        return "sign", "positive" if parts[1] == "+" else "negative"

    def bound(self, parts: list[Any]) -> tuple[str, Bound]:
        quantity, op, number = parts
        return "bounds", Bound(str(quantity), str(op), float(number))

    def edge_pins(self, parts: list[Any]) -> tuple[str, Any]:
        for part in parts[1:]:
            if not part.explicit:
                refuse("a pin is one edge by its full name", _pattern(part))
        return "pinned", frozenset(part.name for part in parts[1:])

    def globs(self, parts: list[Any]) -> tuple[str, Any]:
        return "sites", tuple(_unquoted(part) for part in parts if part.type != "NONE")

    def site_pins(self, parts: list[Any]) -> tuple[str, Any]:
        return "pinned", frozenset(_unquoted(part) for part in parts[1:])


def _items(tokens: Iterable[Any]) -> Numbers:
    found: list[int | Span] = []
    for token in tokens:
        if token.type == "RANGE":
            first, last = map(int, token.split("-"))
            found.append(Span(first, last + 1))
        elif token.type == "SLICE":
            found.append(Span(*(int(n) if n else None for n in token.split(":"))))
        elif token.type == "INT":
            found.append(int(token))
    return tuple(found)


def _unquoted(token: lark.Token) -> str:
    return json.loads(token) if token.type == "QUOTED" else str(token)


def edge_selector_text(selector: EdgeSelector) -> str:
    """Write an edge selector; `read_edge_selector` reads it back equal."""
    parts: list[str] = []
    if selector.names is not None:
        parts.append(", ".join(map(_pattern, selector.names)) or "none")
    for key in ("sender.kind", "receiver.kind"):
        parts += _words(key, getattr(selector, _FIELDS[key]))
        for number in ("layer", "head"):
            name = f"{key.partition('.')[0]}.{number}"
            parts += _listed(name, getattr(selector, _FIELDS[name]))
    return _joined(selector, parts, selector.pinned)


def site_selector_text(selector: SiteSelector) -> str:
    """Write a site selector; `read_site_selector` reads it back equal."""
    parts: list[str] = []
    if selector.sites is not None:
        parts.append(", ".join(map(_quoted, selector.sites)) or "none")
    parts += _words("kind", selector.kinds)
    parts += _listed("layer", selector.layers) + _listed("head", selector.heads)
    return _joined(selector, parts, map(_quoted, selector.pinned))


def _joined(
    selector: EdgeSelector | SiteSelector, parts: list[str], pins: Iterable[str]
) -> str:
    parts += _words("port", selector.ports)
    parts += _listed("position", selector.positions)
    parts += _words("status", selector.statuses)
    if selector.sign is not None:
        parts.append("sign=+" if selector.sign == "positive" else "sign=-")
    parts += [_bound(b) for b in selector.bounds]
    parts += [f"!({other})" for other in selector.exclude]
    pinned = sorted(pins)
    parts += [f"pin={','.join(pinned)}"] if pinned else []
    return " & ".join(parts) or "*"


def _bound(bound: Bound) -> str:
    return f"{bound.quantity}{bound.op}{repr(bound.value).removesuffix('.0')}"


def _pattern(pattern: EdgePattern) -> str:
    receiver = _end(pattern.receiver)
    if pattern.sender == End():
        return receiver
    return f"{_end(pattern.sender)}->{receiver}"


def _end(end: End) -> str:
    letter = {"mlp": "m", "*": "*", "input": "input", "logits": "logits"}
    text = letter.get(end.form, "a")
    if end.form in ("mlp", "a*", "attention", "head", "kv"):
        text += _numbers(end.layers)
    if end.form in ("head", "kv"):
        text += f".{'h' if end.form == 'head' else 'kv'}{_numbers(end.heads)}"
    text += ".*" if end.form == "a*" else ""
    if end.ports is None:
        return text
    return f"{text}<{','.join(sorted(end.ports, key=PORTS.index))}>"


def _numbers(items: Numbers | None) -> str:
    if items is None:
        return "*"
    text = ",".join(map(str, items))
    return text if len(items) == 1 else f"[{text}]"


def _listed(key: str, items: Numbers | None) -> list[str]:
    if items is None:
        return []
    return [f"{key}={','.join(map(str, items)) or 'none'}"]


def _words(key: str, words: frozenset[str] | None) -> list[str]:
    if words is None:
        return []
    return [f"{key}={','.join(sorted(words)) or 'none'}"]


def _quoted(site: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_*][\w.*]*", site, re.ASCII) and site != "none"
    return site if plain else json.dumps(site)
