"""Whoever writes into a folder that others may have prepared goes through one door, `safe_writing`, or by a rename.

A function that opens a file for writing fails here, until it uses the door, makes the file by a rename (`atomic_file`),
or is listed with the reason why nobody else can have put a link or a pipe there.
"""

from __future__ import annotations

import ast

from tests.security.test_every_reader import _called, _functions

WRITES = {"write_text", "write_bytes", "touch", "FileHandler", "savez", "savefig"}
RENAMED = {"atomic_file", "atomic_folder"}  # what they yield has a name that nobody can know, and gets its own at once

FRESH = {  # folders that the function, or its caller, has just made, or that only this user can enter
    "checkpoint.core.commit._write_file", "checkpoint.exchange.export.finish", "checkpoint.exchange.export.write",
    "checkpoint.exchange.export_formats._ask_for_first_token", "checkpoint.exchange.hf_config.copy_settings",
    "checkpoint.exchange.hf_config.read_config", "checkpoint.exchange.pickle_import._extract_tensors",
    "checkpoint.remote.node_parts.keep",
    "config.code.own_runs._create_key", "doctor.all_reduce_process.main", "doctor.all_reduce_process.work",
    "doctor.rates.measure_all_reduce", "launch.autobatch.search._measure", "launch.trained.replay._prepare_run",
    "proof.case_process.write", "proof.hangs.__init__", "proof.prove.prove", "proof.recording.trace.write_facts",
    "proof.scripts.judging.script_comparison.run_case", "proof.scripts.recording.rank_facts.write_rank_facts",
    "proof.scripts.recording.rank_progress._tell", "proof.scripts.replay.content_store._put_leaf",
    "proof.scripts.replay.reading.write_reading", "proof.scripts.replay.row_exchange.close",
    "runtime.communication.collective_log._create_ring", "runtime.heartbeat.__init__",
    "runtime.heartbeat._register_stack_dump", "unisono_birdsong.export.write_encoder",
    "unisono_language.evaluation.environment._start", "unisono_language.evaluation.environment_process._server",
    "unisono_language.evaluation.environment_process.main", "unisono_microbiome.study.artifacts._extract",
    "unisono_sweeps.trial.main", "unisono_sweeps.trial_process._start",
}  # fmt: skip
CACHE = {  # in the user's cache, in which nobody else can write (`cache_entry`)
    "data.compute_once.compute_array_once", "data.compute_once.write", "data.sources.index.cached_array",
    "data.sources.storage.create_cache_folder", "unisono_audio.sources.decoded_cache.make_cache",
    "unisono_audio.sources.decoded_cache._reserve_space",
    "unisono_microbiome.study.storage.__init__", "unisono_microbiome.study.storage._write",
    "unisono_puzzles.data.library._load_or_compute", "unisono_puzzles.data.library.write",
}  # fmt: skip
ASSETS = {  # of a run, whose folder is looked through before it is called (`check_contents`)
    "unisono_birdsong.task.save_assets", "unisono_language.task.save_assets", "unisono_microbiome.task.save_assets",
    "unisono_puzzles.base.save_assets", "unisono_speech.codec.save", "unisono_speech.task.save_assets",
}  # fmt: skip
OTHERS = {
    "checkpoint.remote.object_store.begin": "an object of a store",
    "checkpoint.remote.object_store.send": "an object of a store",
    "launch.autobatch.memory.reset_peak": "a file of the kernel",
    "unisono_audio.sources.scan.scan": "beside the list that the user names",
    "unisono_language.data.tokenizer.train": "in the folder that the user names",
    "unisono_language.data.tokenizer.train_tokenizer": "in the folder that the user names",
    "unisono_microbiome.study.simulate._write": "in the folder that the user names",
    "unisono_speech.data.voices.pcm_wav": "memory",
}


def _is_write(call: ast.Call) -> bool:
    """Whether a call may write into a file of which only the name is known."""
    owner, name = _called(call)
    if name == "open":
        words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
        flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes) or (
            "O_CREAT" in flags and "O_EXCL" not in flags
        )
    kept = name == "mkdir" and {"exist_ok"} == {word.arg for word in call.keywords}  # of a folder that exists
    return name in WRITES or (owner, name) == ("np", "save") or kept


def test_every_file_is_written_through_one_door_or_by_a_rename() -> None:
    """A link named logs/rank-00000.log in a run's folder was appended to, and a pipe of that name hung the resume."""
    found, used = [], set()
    for name, calls in _functions():
        writing = [call for call in calls if _is_write(call)]
        if not writing or RENAMED & {_called(call)[1] for call in calls} or name.startswith("runtime.untrusted."):
            continue
        used.add(name)
        if name not in FRESH | CACHE | ASSETS | OTHERS.keys():
            found += [f"{name}, line {call.lineno}: {_called(call)[1]}" for call in writing]
    assert found == [], "use safe_writing or atomic_file, or say above why nobody else can have put a link there"
    assert (FRESH | CACHE | ASSETS | OTHERS.keys()) - used == set(), "write no files any more"
