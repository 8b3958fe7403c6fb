//! Pools that the process has open, their volumes, and the commands on them.

use serde_json::Value;
use tenmil_base::Span;
use tenmil_drivers::pool::SNAPSHOTS_MAX;

use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::pool_commands::{
    self, DIFFERENCE, FIELDS, JOB, JobKind, JobSpec, LISTED, STORE, WHICH_STORE, boolean_parameter,
    bytes, name_parameter, percent_parameter,
};
use crate::result_type::ResultType;

const VOLUME: &str = "name of the volume";
const CALLED: &str = "new name";
const UNIT: Parameter =
    bytes("cluster_bytes", ParamDefault::Default("65536"), "cluster size, 4 to 64 KiB");
const SUMS: Parameter = boolean_parameter("checksums", "true to pool a checksum of every block");
const RATE: Parameter = Parameter {
    name: "rate_bytes",
    kind: ParamType::Whole { min: 1, max: u64::MAX },
    need: ParamDefault::Default("18446744073709551615"),
    help: "rate limit in bytes per second; the default is no limit",
};
/// Up to one hour.
const UNHEARD: Parameter = Parameter {
    name: "unheard_max_ms",
    kind: ParamType::Whole { min: 0, max: 3_600_000 },
    need: ParamDefault::Default("0"),
    help: "stop the job when it has not been queried for this time; 0 to run to the end",
};
/// Names of the volumes, or of the snapshots, of a command on several.
const SNAPSHOT_NAMES: ParamType = ParamType::Texts { len_max: 4096, count_max: SNAPSHOTS_MAX };
const ID: ParamType = ParamType::Whole { min: 1, max: u64::MAX };

/// Set method that executes the pool command of the same name.
macro_rules! order {
    ($name:literal, $parameters:expr, $help:literal, $example:literal) => {
        Method {
            verb: MethodKind::Set,
            name: $name,
            parameters: $parameters,
            answer: ResultType::Record(FIELDS),
            help: $help,
            example: $example,
            run: |call| pool_commands::execute_command_of_method(call, $name),
        }
    };
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "pools",
        parameters: &[],
        answer: ResultType::Rows(STORE),
        help: "List the open pools and their space usage",
        example: "tenmil get pools --json",
        run: pool_commands::list_pools,
    },
    Method {
        verb: MethodKind::Get,
        name: "volumes",
        parameters: &[WHICH_STORE],
        answer: ResultType::Rows(LISTED),
        help: "List the volumes and snapshots of an open pool and their space usage",
        example: "tenmil get volumes",
        run: pool_commands::list_volumes,
    },
    Method {
        verb: MethodKind::Get,
        name: "volume_diff",
        parameters: &[
            WHICH_STORE,
            name_parameter("from", "the earlier volume or snapshot"),
            name_parameter("to", "the later volume or snapshot"),
            bytes(
                "at_bytes",
                ParamDefault::Default("0"),
                "offset to start at: next_bytes of the previous result",
            ),
        ],
        answer: ResultType::Record(DIFFERENCE),
        help: "List the ranges in which two volumes differ, up to 4096 per call",
        example: "tenmil get volume_diff from=monday to=tuesday",
        run: pool_commands::volume_differences,
    },
    order!(
        "volume_create",
        &[
            WHICH_STORE,
            name_parameter("name", CALLED),
            bytes("size_bytes", ParamDefault::Required, "size"),
            UNIT,
            SUMS,
            boolean_parameter(
                "thick",
                "true for a thick volume, with space reserved for all of its blocks; volume_inflate allocates it"
            ),
        ],
        "Create an empty volume",
        "tenmil set volume_create name=db size_bytes=107374182400"
    ),
    order!(
        "volume_create_from",
        &[
            WHICH_STORE,
            name_parameter("name", CALLED),
            name_parameter(
                "image",
                "URI of the parent image, which unwritten blocks are read from"
            ),
            bytes("size_bytes", ParamDefault::Optional, "size; by default that of the image"),
            UNIT,
            SUMS,
        ],
        "Create a volume backed by an image outside the pool; the image must not change",
        "tenmil set volume_create_from name=vm image=file:/srv/golden.img"
    ),
    order!(
        "volume_delete",
        &[
            WHICH_STORE,
            name_parameter("name", VOLUME),
            boolean_parameter("orphan", "true to delete a snapshot even if it has clones"),
            boolean_parameter("if_exists", "true to succeed if the volume does not exist"),
        ],
        "Delete a volume that is not open, or a snapshot",
        "tenmil set volume_delete name=monday"
    ),
    order!(
        "volume_rename",
        &[WHICH_STORE, name_parameter("name", VOLUME), name_parameter("to", CALLED)],
        "Rename a volume",
        "tenmil set volume_rename name=trial to=next"
    ),
    order!(
        "volume_resize",
        &[
            WHICH_STORE,
            name_parameter("name", VOLUME),
            bytes("size_bytes", ParamDefault::Required, "new size"),
            boolean_parameter("shrink", "true to allow shrinking, if the volume is not open"),
        ],
        "Resize a volume; clients are notified if it has grown",
        "tenmil set volume_resize name=db size_bytes=214748364800"
    ),
    order!(
        "volume_snapshot",
        &[WHICH_STORE, name_parameter("volume", VOLUME), name_parameter("name", CALLED)],
        "Create a snapshot of a volume",
        "tenmil set volume_snapshot volume=db name=monday"
    ),
    order!(
        "volume_snapshots",
        &[
            WHICH_STORE,
            Parameter {
                name: "volumes",
                kind: SNAPSHOT_NAMES,
                need: ParamDefault::Required,
                help: "names of the volumes",
            },
            Parameter {
                name: "names",
                kind: SNAPSHOT_NAMES,
                need: ParamDefault::Required,
                help: "names of their snapshots, in the same order",
            },
        ],
        "Create snapshots of several volumes at one point in time: no write is in one and an earlier one not in another; all or none",
        "tenmil set volume_snapshots volumes=db volumes=log names=db-monday names=log-monday"
    ),
    order!(
        "volume_clone",
        &[
            WHICH_STORE,
            name_parameter("from", "source volume or snapshot"),
            name_parameter("name", CALLED)
        ],
        "Create a clone of a volume or snapshot",
        "tenmil set volume_clone from=monday name=trial"
    ),
    order!(
        "volume_rollback",
        &[
            WHICH_STORE,
            name_parameter("volume", VOLUME),
            name_parameter("snapshot", "name of the snapshot")
        ],
        "Roll a volume that is not open back to one of its snapshots",
        "tenmil set volume_rollback volume=db snapshot=monday"
    ),
    order!(
        "pool_grow",
        &[
            WHICH_STORE,
            Parameter {
                name: "add",
                kind: ParamType::Texts { len_max: 4096, count_max: 64 },
                need: ParamDefault::Optional,
                help: "URIs of devices to add, as seen by the process: all or none",
            },
            boolean_parameter(
                "overwrite",
                "true to add the device even if it contains data, which are lost"
            ),
        ],
        "Grow a pool by the new space of its devices, or by other devices",
        "tenmil set pool_grow add=file:/srv/more add=file:/srv/again"
    ),
    order!(
        "pool_device",
        &[
            WHICH_STORE,
            Parameter {
                name: "number",
                kind: ParamType::Whole { min: 1, max: u32::MAX as u64 },
                need: ParamDefault::Required,
                help: "number of the device, from 1",
            },
            name_parameter("uri", "new URI of the device, as seen by the process"),
        ],
        "Record a new location of a device of a pool, which stays open",
        "tenmil set pool_device number=1 uri=file:/mnt/more"
    ),
    order!(
        "pool_thresholds",
        &[
            WHICH_STORE,
            percent_parameter(
                "first_percent",
                ParamDefault::Required,
                "used space of the first warning, in percent; 0 to disable it"
            ),
            percent_parameter(
                "second_percent",
                ParamDefault::Default("0"),
                "used space of the second warning, in percent; 0 to disable it"
            ),
        ],
        "Set the thresholds at which a pool warns about its used space",
        "tenmil set pool_thresholds first_percent=70 second_percent=90"
    ),
    Method {
        verb: MethodKind::Set,
        name: "pool_scrub",
        parameters: &[WHICH_STORE, RATE, UNHEARD],
        answer: ResultType::Record(JOB),
        help: "Start a scrub: read all data of a pool at low priority and verify their checksums, where present",
        example: "tenmil set pool_scrub rate_bytes=100000000",
        run: |call| start_volume_job(call, JobKind::Scrub),
    },
    Method {
        verb: MethodKind::Set,
        name: "pool_check",
        parameters: &[WHICH_STORE, UNHEARD],
        answer: ResultType::Record(JOB),
        help: "Start a check of the consistency of all metadata of a pool as of its last commit, without interrupting other I/O",
        example: "tenmil set pool_check",
        run: |call| start_volume_job(call, JobKind::Check),
    },
    Method {
        verb: MethodKind::Set,
        name: "volume_inflate",
        parameters: &[WHICH_STORE, name_parameter("name", VOLUME), RATE, UNHEARD],
        answer: ResultType::Record(JOB),
        help: "Start to allocate all blocks of a volume, which makes it thick",
        example: "tenmil set volume_inflate name=db",
        run: |call| start_volume_job(call, JobKind::Inflate(volume_name_argument(call))),
    },
    Method {
        verb: MethodKind::Set,
        name: "volume_decouple",
        parameters: &[WHICH_STORE, name_parameter("name", VOLUME), RATE, UNHEARD],
        answer: ResultType::Record(JOB),
        help: "Start to detach a volume from its parent image, by copying what it reads from the image (like rbd flatten)",
        example: "tenmil set volume_decouple name=next",
        run: |call| start_volume_job(call, JobKind::Decouple(volume_name_argument(call))),
    },
    Method {
        verb: MethodKind::Set,
        name: "volume_send",
        parameters: &[
            WHICH_STORE,
            name_parameter("name", "name of the snapshot"),
            Parameter {
                name: "from",
                kind: ParamType::Text { len_max: 4096 },
                need: ParamDefault::Optional,
                help: "base snapshot of an incremental stream",
            },
            UNHEARD,
        ],
        answer: ResultType::Record(JOB),
        help: "Start to send a snapshot, at low priority, to a Unix stream whose descriptor is attached to the request",
        example: "tenmil set volume_send name=tuesday from=monday",
        run: |call| {
            let from = call.arguments.text("from").map(str::to_owned);
            start_volume_job(call, JobKind::Send { name: volume_name_argument(call), from })
        },
    },
    Method {
        verb: MethodKind::Set,
        name: "volume_receive",
        parameters: &[WHICH_STORE, name_parameter("name", "name of the new snapshot"), UNHEARD],
        answer: ResultType::Record(JOB),
        help: "Start to receive a snapshot, at low priority, from a Unix stream whose descriptor is attached to the request",
        example: "tenmil set volume_receive name=monday",
        run: |call| start_volume_job(call, JobKind::Receive(volume_name_argument(call))),
    },
    Method {
        verb: MethodKind::Get,
        name: "jobs",
        parameters: &[Parameter {
            name: "id",
            kind: ID,
            need: ParamDefault::Optional,
            help: "only the job with this identifier",
        }],
        answer: ResultType::Rows(JOB),
        help: "List the jobs with their progress and results",
        example: "tenmil get jobs --json",
        run: pool_commands::list_jobs,
    },
    Method {
        verb: MethodKind::Set,
        name: "job",
        parameters: &[
            Parameter { name: "id", kind: ID, need: ParamDefault::Required, help: "identifier" },
            Parameter {
                name: "stop",
                kind: ParamType::Flag,
                need: ParamDefault::Required,
                help: "true to stop the job; completed work is preserved",
            },
        ],
        answer: ResultType::Record(JOB),
        help: "Stop a job; an event reports when it has ended",
        example: "tenmil set job id=1 stop=true",
        run: pool_commands::stop_job,
    },
];

fn volume_name_argument(call: &CallContext<'_>) -> String {
    call.arguments.text("name").unwrap_or_default().to_owned()
}

fn start_volume_job(call: &CallContext<'_>, what: JobKind) -> Result<Value, RpcError> {
    let some = |name, none| call.arguments.integer(name).filter(|value| *value != none);
    let unheard_max = some("unheard_max_ms", 0).map(Span::from_ms);
    pool_commands::start_job(
        call,
        JobSpec { what, rate_bytes: some("rate_bytes", u64::MAX), unheard_max },
    )
}
