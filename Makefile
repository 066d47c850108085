# Each target does all of its own set-up in .venv; a machine with Python 3.11 or later is enough.
PYTHON ?= python3
BIN := .venv/bin
# three processes on two cores: some tests wait for a browser or for processes of their own
WORKERS ?= 3
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-full test-oldest bench lint types docs figures browser screenshots clean

.venv/user: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/user
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/user
	OMP_NUM_THREADS=2 $(BIN)/normscope demo

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy
	$(BIN)/python -m docs.tools.examples

# the browser tests drive Debian's Chromium; without it they are skipped, with the reason
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& { apt-get install -y -qq chromium >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }; }; } \
		|| echo "no Chromium here, and none could be installed: browser tests are skipped"

.venv/docs: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# the site, into build/site; the variable turns off an announcement of the theme, not a warning about these pages
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; to search, serve it: $(BIN)/python -m http.server -d build/site"

# pictures of the concept pages, and the table of public names
figures: .venv/dev
	$(BIN)/python -m docs.tools.figures
	$(BIN)/python -m docs.tools.surface

screenshots: .venv/dev browser
	$(BIN)/python -m tests.browser.screenshots docs/images

test: lint types browser
	$(BIN)/pytest -q -n $(WORKERS)

test-full: .venv/dev browser
	$(BIN)/pytest -q -n $(WORKERS) -m 'full or not full'

# every lower bound of pyproject.toml but torch's, for which constraints.txt stands; ray and the like come as they are
.venv-oldest/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -c "import tomllib; \
		project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		names = [*project['dependencies'], *project['optional-dependencies']['dashboard']]; \
		print(*(name.replace('>=', '==') for name in names if not name.startswith('torch')), sep='\n')" > .venv-oldest/floors.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c .venv-oldest/floors.txt torch -e '.[dashboard,papers]'
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c .venv-oldest/floors.txt \
		pytest pytest-xdist hypothesis jsonschema 'httpx<0.28'
	touch $@

test-oldest: .venv-oldest/dev
	! .venv-oldest/bin/python -c 'import pandas' 2>/dev/null
	.venv-oldest/bin/python -m pytest -q -n $(WORKERS) --ignore tests/browser --doctest-ignore-import-errors

bench: .venv/dev
	@echo "bench/ compares with peers: see docs/benchmarks.md for how their environment is made"
	OMP_NUM_THREADS=2 $(BIN)/python -m bench

clean:
	rm -rf .venv .venv-oldest build *.egg-info
