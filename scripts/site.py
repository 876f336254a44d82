"""Hooks of mkdocs for `make docs`: they add pages from outside of docs/ and the evidence page, convert links, and check
pages.

README.md is the front page. CHANGELOG.md, CONTRIBUTING.md, SECURITY.md, and the files in examples/ and configs/ become
pages too. In the sources, links name files of the repository, relative to the page. The hooks convert them to links to
pages of the site. A warning fails the build.
"""

import importlib.util
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FRONT = {"README.md": "index.md"}
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SHOWN = {"examples": "python", "configs": "toml"}
"""Folders whose files are pages, and their language."""
LINK = re.compile(r"(?<!`)(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
TEXT = re.compile(r"<(p|li)>(.*?)</\1>", re.DOTALL)
log = logging.getLogger("mkdocs.hooks.site")


def evidence() -> Any:
    """Return the module evidence.py in this folder, which an import would not find: mkdocs runs hooks without their
    folder on the path."""
    spec = importlib.util.spec_from_file_location("evidence", Path(__file__).with_name("evidence.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EVIDENCE = evidence()


def page_of(path: str) -> str | None:
    """Return the page or picture of the site that shows a file of the repository, or None if nothing shows it."""
    folder = path.partition("/")[0]
    if folder == "docs":
        return path.removeprefix("docs/") if (ROOT / path).is_file() else None
    if path == "LICENSE":
        return "LICENSE.md"
    if folder in SHOWN and (ROOT / path).is_file():
        return f"{path}.md"
    return FRONT.get(path, path if path in PAGES else None)


def file_of(page: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    back = {shown: path for path, shown in FRONT.items()}
    if page in back or page in PAGES:
        return back.get(page, page)
    return page.removesuffix(".md") if page.startswith(tuple(f"{folder}/" for folder in SHOWN)) else f"docs/{page}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, and the evidence page."""
    content = {page: (ROOT / path).read_text() for path, page in [*FRONT.items(), *zip(PAGES, PAGES)]}
    content["evidence.md"] = EVIDENCE.markdown()
    content["LICENSE.md"] = f"# License\n\n```\n{(ROOT / 'LICENSE').read_text()}```\n"
    for folder, language in SHOWN.items():
        for path in sorted((ROOT / folder).iterdir()):
            if path.is_file():
                name = f"{folder}/{path.name}"
                content[f"{name}.md"] = f"# {name}\n\n```{language}\n{path.read_text()}```\n"
    for page, text in content.items():
        file = File.generated(config, page, content=text)
        if page == "LICENSE.md" or page.startswith(tuple(SHOWN)):
            from mkdocs.structure.files import InclusionLevel

            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Convert links to files of the repository into links to the pages that show them, and remove the evidence."""
    here = page.file.src_uri
    if here == "evidence.md":
        return markdown
    markdown = EVIDENCE.hidden(markdown)
    source = file_of(here)

    def moved(link: re.Match[str]) -> str:
        start, target, rest = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        shown = page_of(path)
        if shown is None:
            log.warning("%s: links to %s, which is no page of the site", source, target)
            return link.group()
        return f"{start}{posixpath.relpath(shown, posixpath.dirname(here) or '.')}{rest}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])


def on_post_build(config: Any) -> None:
    """Also write the search index as a script: a page that is opened from a folder cannot read the JSON file."""
    index = Path(config["site_dir"], "search", "search_index.json").read_text()
    Path(config["site_dir"], "search", "search_index.js").write_text(f"var __index = {index}")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Warn about tables and lists that were not recognized, because an empty line or a column is missing."""
    for _, text in TEXT.findall(html):
        plain = re.sub(r"<code.*?</code>|<pre.*?</pre>", "", text, flags=re.DOTALL)
        if found := re.search(r"^(\|.*\||- .*|\d+\. .*|#+ .*)$", plain, re.MULTILINE):
            log.warning("%s: this did not become a table, list or heading: %s", page.file.src_uri, found.group()[:80])
    return html
