"""Whoever reads or copies a file goes through one door, `safe_paths`: no link out of a folder, no pipe, no device.

A function that reads otherwise fails here, until it uses the door or is listed with the reason why nobody else can have
written what it reads.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOORS = {"open_inside", "open_regular", "open_text", "path_of"}
READS = {"read_text", "read_bytes", "copytree", "copyfile", "copy2", "fromfile", "loadtxt", "genfromtxt"}
LIBRARIES = {"memory_map", "memmap", "safe_open", "load_file", "File", "ParquetFile", "OSFile", "ZipFile"}
LOADERS = {"np", "torch", "yaml", "json"}  # whose `load` takes a path or a file
KERNEL = ("/proc/", "/sys/")

PRIVATE = {
    # code that runs anyway, or that is installed with this program
    "cli.new": "the skeleton in this package", "proof.diagnoses.explain": "a page in this package",
    "config.code.code_digest": "modules that run", "launch.processes.preloading":
    "modules that run", "runtime.code.entry_points": "which packages are installed",
    # files of the kernel
    "config.environment": "", "doctor.facts": "", "launch.autobatch.memory": "", "runtime.cpu_quota": "",
    "supervise.identity": "", "supervise.processes": "",
    # temporary folders that this process has made, which only its user can enter
    "doctor.all_reduce_process": "", "doctor.rates": "", "launch.autobatch.probe": "", "launch.autobatch.search": "",
    "engines.jax.profiler": "", "proof.case_process": "", "proof.hangs": "", "proof.recording.trace": "",
    "proof.scripts.recording.rank_facts": "", "proof.scripts.recording.rank_progress": "",
    "proof.scripts.recording.script_process": "",
    "proof.scripts.replay.content_store": "", "proof.scripts.replay.reading": "",
    "proof.scripts.replay.row_exchange": "", "unisono_sweeps.trial_process": "",
    # memory that is shared with the processes that this one has started
    "data.loading.ipc": "",
    # the process that reads a pickle, which can reach nothing but the two files that it was given
    "checkpoint.exchange.dcp_folder": "",  # read in the sandboxed process, from files that its parent has opened
    "checkpoint.exchange.pickle_process": "",
}  # fmt: skip
TOLD = {  # single functions
    "unisono_audio.sources.decoded_cache._reserve_space": "a temporary file that this process has just made",
    "data.sources.storage.open_plain": "the stream that its argument is",
    "data.sources.formats.arrow.__init__": "`File.open`", "data.sources.formats.arrow._batch": "`File.open`",
    **{
        f"data.sources.formats.parquet.{name}": "`File.open`, and what it gave"
        for name in ("_open_file", "block", "_parquet", "_check_size", "_check_footer")
    },
    "checkpoint.core.arrays._read_piece": "its own `read_bytes`",
    "engines.torch.profiler.stop": "its own file",
    "observe.tensorboard.picture": "of the user's callback", "observe.tensorboard.sound": "of the user's callback",
    "unisono_sweeps.axes._key_lines": "the user's sweep, a Python file that runs",
    "unisono_sweeps.report.page.render": "files in the package",
    "unisono_microbiome.study.table._read_hdf5": "the open file that its argument is",
    "runtime.untrusted.archives.open_archive": "the open file that its argument is",
    "runtime.untrusted.archives.load_arrays": "the open file that its argument is",
    "unisono_microbiome.study.artifacts.write_artifact": "the archive that it writes",
}  # fmt: skip

NAMED = {  # who follows a link, and why the user has named that very file, or nobody else can have made it one
    "runtime.files.file_hash": "of which only a hash is kept", "runtime.untrusted.hdf5.check_within_limits": "",
    "config.safe_yaml.check_yaml": "", "cli.script._parse": "", "cli.completion._of_file": "",
    "data.table_files.read_table": "", "checkpoint.exchange.hf_shards._open_file": "where no folder was named",
    "checkpoint.exchange.pickle_import._open": "where no folder was named",
    "engines.torch.state.moments._open": "", "observe.profile.read_trace": "written by this process",
    "data.sources.formats.npy.map_array": "in the user's cache",
    "checkpoint.remote.object_store.send": "linked or copied by `safe_paths`",
    "launch.notebook.cell_source.write": "which is compared alone",
    "unisono_audio.sources.archives._index": "or below a folder, by `check_way`",
    "unisono_audio.sources.source._read_left_out": "", "unisono_audio.sources.metadata._read_delimited": "",
    "unisono_audio.sources.metadata._read_json": "", "unisono_audio.sources.metadata._read_json_lines": "",
    "unisono_audio.sources.scan._load_progress": "", "unisono_audio.sources.journal.read_journal": "",
    "unisono_birdsong.evaluation.results._read": "", "unisono_language.data.chat.from_tokenizer": "",
    "unisono_language.generate._read_prompts": "",
    "unisono_language.data.tokenizer._load": "or below a folder, by `check_link`",
    "unisono_language.task.save_assets": "the tokenizer that was read",
    "unisono_microbiome.study.artifacts._extract": "", "unisono_microbiome.study.artifacts._write_tsv": "just written",
    "unisono_microbiome.study.tree.root": "", "unisono_microbiome.study.table._read_biom": "",
    "unisono_microbiome.study.matrices._npz": "", "unisono_microbiome.study.matrices._h5": "",
    "unisono_microbiome.study.matrices._tsv": "", "unisono_microbiome.study.matrices._qza": "",
    "unisono_microbiome.study.sequences._parse_fasta": "", "unisono_puzzles.data.tables.read_puzzles": "",
    "unisono_language.evaluation.harness._task_name": "a YAML file that eval.harness names",
    "unisono_speech.data.samples._file_digest": "as for `read`",
    "unisono_speech.data.samples.read": "what a list names, which may be any recording",
    "unisono_speech.data.manifest._entries": "",
}  # fmt: skip

OWN_RECORDS = {  # who has written what they parse by themselves
    "runtime.untrusted.safe_paths": "the door",
    # processes that this one has started, or that started it, over pipes, arguments and private folders
    "checkpoint.exchange.pickle_process": "", "checkpoint.remote.upload": "", "checkpoint.remote.upload_process": "",
    "checkpoint.remote.node_parts": "",
    "engines.jax.devices": "", "engines.jax.profiler": "",
    "launch.autobatch.probe": "", "launch.autobatch.search": "", "launch.processes.fork_server": "",
    "observe.profile": "", "proof.recording.trace": "", "proof.scripts.recording.rank_facts": "",
    "proof.scripts.recording.rank_progress": "", "proof.scripts.replay.reading": "",
    "proof.scripts.recording.script_process": "",
    "supervise.monitor": "",
    "unisono_sweeps.trial": "",
    # ranks of this run
    "engines.torch.parallel.process_group": "", "runtime.communication.collective_log": "",
    # rows of data and lists of samples, each of which is checked with a sentence of its own
    "data.sources.formats.lines": "", "unisono_audio.sources.archives": "", "unisono_audio.sources.metadata": "",
    "unisono_language.data.conversations": "", "unisono_speech.data.manifest": "",
    "checkpoint.core.manifest": "by its format, then by its shape",
}  # fmt: skip


_PARSERS = (("json", "loads"), ("json", "load"), ("json", "JSONDecoder"), ("safe_paths", "decode_json"))


class _Outside(list[ast.Call]):
    """The calls outside of all functions."""


@cache
def _functions() -> list[tuple[str, list[ast.Call]]]:
    """Every function of all our packages but the fault matrix, which is a test bed, with the calls in it.

    Modules of the core have their place in it as their name; calls outside of functions are of the function ``.
    """
    found = []
    for source in sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("recipes/*/src")]):
        for path in source.rglob("*.py"):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removeprefix("unisono.")
            if name.startswith("unisono_faults"):
                continue
            outside = _Outside()
            _visit(ast.parse(path.read_text(encoding="utf-8")), name, [outside], found)
            found.append((f"{name}.", outside))
    return found


def _visit(node: ast.AST, module: str, owners: list[list[ast.Call]], found: list[tuple[str, list[ast.Call]]]) -> None:
    """Give each call below a node to all the functions around it, or to the module if there are none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inside: list[ast.Call] = []
        owners = [*owners[isinstance(owners[0], _Outside) :], inside]
        found.append((f"{module}.{node.name}", inside))
    elif isinstance(node, ast.Call):
        for calls in owners:
            calls.append(node)
    for child in ast.iter_child_nodes(node):
        _visit(child, module, owners, found)


def _called(call: ast.Call) -> tuple[str, str]:
    """The owner and the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return (call.func.value.id if isinstance(call.func.value, ast.Name) else ""), call.func.attr
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def _is_read(call: ast.Call) -> bool:
    """Whether a call may read a file of which only the name is known."""
    owner, name = _called(call)
    if owner in ("safe_paths", "archive", "self") or any(
        isinstance(node, ast.Constant) and str(node.value).startswith(KERNEL) for node in ast.walk(call)
    ):
        return False
    if name == "File" and owner != "h5py":
        return False
    if name == "open" and owner not in ("os", "system", "av", "listener"):
        words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
        return not any(set(mode) <= set("wxab+") and set(mode) & set("wxa") for mode in modes)
    copies = name in ("copy", "move") and owner == "shutil"
    return (
        name in READS | LIBRARIES
        or copies
        or (name == "load" and owner in LOADERS)
        or (owner, name) == ("pq", "read_table")
    )


def test_every_file_is_read_and_copied_through_one_door() -> None:
    """Links out of a run's folder were copied, and pipes hung, wherever a module opened a name by itself."""
    found, used = [], set()
    for name, calls in _functions():
        reading = [call for call in calls if _is_read(call)]
        module = name.rpartition(".")[0]
        if not reading or module == "runtime.untrusted.safe_paths":
            continue
        if module in PRIVATE or name in TOLD:
            used.add(module if module in PRIVATE else name)
            continue
        through = any(_called(call)[0] == "safe_paths" and _called(call)[1] in DOORS for call in calls)
        if not through or any(_called(call)[1] in READS for call in reading):
            found += [f"{name}, line {call.lineno}: {_called(call)[1]}" for call in reading]
    assert found == [], "use safe_paths, or say above why nobody else can have written these files"
    assert (PRIVATE.keys() | TOLD.keys()) - used == {"checkpoint.exchange.pickle_process"} - used, (
        "read no files any more"
    )


def test_a_link_is_followed_only_to_a_file_that_the_user_named() -> None:
    """A name found in a folder, by a glob or fixed, was opened like one that was typed: a private key was a row."""
    following = {
        name
        for name, calls in _functions()
        if any(_called(call)[1] in ("open_regular", "read_regular", "open_text") for call in calls)
        and name.rpartition(".")[0] != "runtime.untrusted.safe_paths"
    }
    assert following == NAMED.keys(), "use open_inside, read_bytes or open_found, or say above who has named that file"


def test_every_record_has_a_shape_that_is_checked_where_it_is_read() -> None:
    """Missing keys, texts for numbers and numbers of 5,000 digits were tracebacks wherever a reader guarded itself."""
    found, used = [], set()
    for name, calls in _functions():
        module = name.rpartition(".")[0]
        parsing = [call for call in calls if _called(call) in _PARSERS]
        own = [
            call for call in parsing if any("dump" in _called(c)[1] for c in ast.walk(call) if isinstance(c, ast.Call))
        ]
        doors = [call for call in calls if _called(call)[1] in ("read_json", "parse_json", "read_asset")]
        loose = [call for call in doors if any(isinstance(a, ast.Name) and a.id == "Any" for a in call.args)]
        if len(parsing) > len(own) or loose:
            used.add(module)
            if module not in OWN_RECORDS:
                found += [f"{name}, line {call.lineno}" for call in (*parsing, *loose) if call not in own]
    assert found == [], "use safe_paths.parse_json with a shape, or say above who has written these records"
    assert OWN_RECORDS.keys() == used, "parse no records any more"


def test_every_sparse_matrix_of_a_file_goes_through_one_function() -> None:
    """scipy writes where the index of a matrix says, so only the module that checks it builds one."""
    kinds = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")
    builders = {f"{kind}_{form}" for kind in kinds for form in ("array", "matrix")}
    builders |= {"load_npz", "mmread", "from_hdf5", "parse_table", "load_table"}
    building = {n.rpartition(".")[0] for n, calls in _functions() if builders & {_called(call)[1] for call in calls}}
    assert building == {"unisono_microbiome.study.sparse"}
