"""Makes a package importable whose sources are in memory. Run once by the crate, which passes its table of sources."""

import importlib.abc
import importlib.util
import sys


class SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the modules of one package.

    `get_source` is what tracebacks and `inspect.getsource` ask for; `get_code` and `exec_module` are inherited.
    """

    def __init__(self, package, sources):
        self.package = package
        self.sources = {f"{package}.{name}" if name else package: rest for name, *rest in sources}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.get_filename(fullname))

    def get_filename(self, fullname):
        # Not in angle brackets as a whole: linecache takes such a name for code that has no source.
        return f"<embedded>/{fullname.replace('.', '/')}{'/__init__' if self.is_package(fullname) else ''}.py"

    def is_package(self, fullname):
        return self.sources[fullname][0]

    def get_source(self, fullname):
        return self.sources[fullname][1]

    def get_code(self, fullname):
        return compile(self.get_source(fullname), self.get_filename(fullname), "exec", dont_inherit=True)


def install(package, sources):
    sys.meta_path.append(SourceFinder(package, sources))
