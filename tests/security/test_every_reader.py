"""Every module that opens a file: those whose files' names come from other files open them by `safe_paths`.

A module that begins to read files fails here until it is listed: as one that takes names out of files, and then uses
`safe_paths`, or with the reason why its names are not foreign.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENERS = {"open_inside", "read_bytes", "read_text", "copy_inside", "is_inside", "destination",
           "components", "open_regular"}  # fmt: skip
READS = {"open", "read_text", "read_bytes", "memory_map", "safe_open", "load_file", "memmap", "File", "ParquetFile",
         "OSFile"}  # fmt: skip
LOADERS = {"np", "torch", "yaml", "json"}  # whose `load` takes a path or a file


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules whose files' names stand in other files: manifests, indices, lists of assets, data sets, stores.
FOREIGN = _names("""
    checkpoint.core.arrays checkpoint.core.assets checkpoint.core.manifest checkpoint.core.verify
    checkpoint.exchange.export_formats checkpoint.exchange.hf_config checkpoint.exchange.hf_shards
    checkpoint.exchange.pickle_import checkpoint.remote.restore config.safe_yaml data.prepare.manifest
    data.sources.discovery launch.nodes.run_token unisono_birdsong.export unisono_language.tokenizer
    unisono_speech.codec unisono_speech.folder
""")
# Modules that read the path that a user names, a file of fixed name beside it, or a list that may name any file.
CHOSEN = _names("""
    unisono_audio.recordings cli.main cli.new config.code_digest unisono_audio.sources.archives
    unisono_audio.sources.decoded_cache unisono_audio.sources.metadata
    unisono_audio.sources.scan unisono_audio.sources.source data.sources.arrow data.sources.lines data.sources.npy
    data.sources.parquet data.sources.storage data.table_files proof.certificate
    unisono_microbiome.study.matrices unisono_microbiome.study.sequences unisono_microbiome.study.table
    unisono_puzzles.data.arc unisono_puzzles.data.arrays unisono_puzzles.data.tables unisono_speech.generate
    unisono_speech.manifest unisono_speech.samples runtime.hdf5 supervise.diagnose
""")
# Modules that read what this program has written for itself, bytes in memory, or files of the kernel.
OWN = _names("""
    unisono_audio.codecs checkpoint.exchange.export checkpoint.exchange.pickle_process checkpoint.remote.object_store
    checkpoint.remote.store_lock checkpoint.remote.upload checkpoint.remote.upload_process config.environment
    data.cache_lock data.compute_once data.ledger data.loading.ipc data.prepare.shards unisono_audio.sources.journal
    data.sources.index
    doctor.all_reduce_process doctor.facts doctor.rates engines.jax.profiler engines.torch.profiler
    launch.autobatch.memory launch.autobatch.probe launch.autobatch.search launch.nodes.agreement
    launch.processes.monitor_client launch.processes.preloading observe.events observe.logs
    observe.profile observe.tensorboard observe.trackers proof.case_process proof.hangs
    proof.recording.case_recorder proof.recording.trace proof.scripts.rank_facts proof.scripts.rank_progress
    proof.scripts.script_process unisono_birdsong.evaluation.pictures unisono_language.tokens
    unisono_puzzles.data.library unisono_puzzles.data.prepared
    unisono_speech.library unisono_speech.voices runtime.collective_log runtime.files
    runtime.heartbeat runtime.safe_paths supervise.collective_mismatch supervise.identity supervise.monitor
    supervise.preemption supervise.processes supervise.run_lock supervise.stacks training.telemetry
""")


def _calls(path: Path) -> set[tuple[str, str]]:
    """All calls of a module, as owner and name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            found.add((owner, node.func.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(("", node.func.id))
    return found


def _modules() -> dict[str, set[tuple[str, str]]]:
    """Of all our packages but the fault matrix, which is a test bed; modules of the core by their place in it."""
    found = {}
    for source in sorted([*ROOT.glob("packages/*/src"), *ROOT.glob("recipes/*/src")]):
        for path in source.rglob("*.py"):
            name = ".".join(path.relative_to(source).with_suffix("").parts)
            if not name.startswith("unisono_faults"):
                found[name.removeprefix("unisono.")] = _calls(path)
    return found


def _reads(calls: set[tuple[str, str]]) -> bool:
    return any(
        owner not in ("safe_paths", "os") and (name in READS or (name == "load" and owner in LOADERS))
        for owner, name in calls
    )


def test_every_module_that_opens_files_is_listed() -> None:
    reading = {name for name, calls in _modules().items() if _reads(calls)}
    assert len(reading) > 50
    assert reading - FOREIGN - CHOSEN - OWN == set(), "whose files' names come from other files? then use safe_paths"
    assert (CHOSEN | OWN) - reading == set(), "these open no files any more"


def test_names_out_of_files_are_opened_by_one_module() -> None:
    modules = _modules()
    using = {name for name, calls in modules.items() if any(o == "safe_paths" and n in OPENERS for o, n in calls)}
    assert using >= FOREIGN, f"{sorted(FOREIGN - using)} take names from files and do not use safe_paths"
    assert using - FOREIGN - CHOSEN - OWN == set(), "list them as FOREIGN"


def test_every_sparse_matrix_of_a_file_goes_through_one_function() -> None:
    """scipy writes where the index of a matrix says, so only the module that checks it builds one."""
    kinds = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")
    builders = {f"{kind}_{form}" for kind in kinds for form in ("array", "matrix")}
    builders |= {"load_npz", "mmread", "from_hdf5", "parse_table", "load_table"}
    building = {name for name, calls in _modules().items() if builders & {called for _, called in calls}}
    dense = {"unisono_microbiome.study.diversity"}  # counts that it has drawn itself, as a whole array
    assert building == {"unisono_microbiome.study.sparse"} | dense
