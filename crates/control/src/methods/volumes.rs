//! Stores of volumes that the process has open: what is told of them, and what is done with them.

use base::Span;
use serde_json::Value;

use crate::kind::Kind;
use crate::method::{Call, Method, Need, Parameter, Verb};
use crate::orders::{
    self, DIFFERENCE, JOB, LISTED, Long, STORE, TOLD, WHICH_STORE, What, bytes, flag, named,
    percent,
};
use crate::refusal::Refusal;
use crate::shape::Shape;

const VOLUME: &str = "the volume's name in the store";
const CALLED: &str = "what it is to be called";
const UNIT: Parameter =
    bytes("unit_bytes", Need::Default("65536"), "in what pieces room is given to it: 4 to 64 KiB");
const SUMS: Parameter = flag("checksums", "true to keep a checksum of every block");
const RATE: Parameter = Parameter {
    name: "rate_bytes",
    kind: Kind::Whole { min: 1, max: u64::MAX },
    need: Need::Default("18446744073709551615"),
    help: "so many bytes in a second at most; that is as fast as it goes",
};
/// Up to an hour.
const UNHEARD: Parameter = Parameter {
    name: "unheard_max_ms",
    kind: Kind::Whole { min: 0, max: 3_600_000 },
    need: Need::Default("0"),
    help: "stop when nobody has asked about the job for so long; 0 to go on to the end",
};
const ID: Kind = Kind::Whole { min: 1, max: u64::MAX };

/// An order, by the method of this name.
macro_rules! order {
    ($name:literal, $parameters:expr, $help:literal, $example:literal) => {
        Method {
            verb: Verb::Set,
            name: $name,
            parameters: $parameters,
            answer: Shape::Record(TOLD),
            help: $help,
            example: $example,
            run: |call| orders::give(call, $name),
        }
    };
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "stores",
        parameters: &[],
        answer: Shape::Rows(STORE),
        help: "List the stores of volumes that are open, and how their room is used",
        example: "tenmil get stores --json",
        run: orders::all_stores,
    },
    Method {
        verb: Verb::Get,
        name: "volumes",
        parameters: &[WHICH_STORE],
        answer: Shape::Rows(LISTED),
        help: "List the volumes and snapshots of a store that is open, and the room each takes",
        example: "tenmil get volumes",
        run: orders::all_volumes,
    },
    Method {
        verb: Verb::Get,
        name: "volume_diff",
        parameters: &[
            WHICH_STORE,
            named("from", "the volume or snapshot that came first"),
            named("to", "the other one"),
            bytes("at_bytes", Need::Default("0"), "where to begin: next_bytes of the last answer"),
        ],
        answer: Shape::Record(DIFFERENCE),
        help: "Say what a volume has that another one has not, 4096 ranges at a time",
        example: "tenmil get volume_diff from=monday to=tuesday",
        run: orders::differ,
    },
    order!(
        "volume_create",
        &[
            WHICH_STORE,
            named("name", CALLED),
            bytes("size_bytes", Need::Required, "how large it is"),
            UNIT,
            SUMS,
            flag("thick", "true to promise it room for all of its blocks; volume_inflate gives it"),
        ],
        "Make an empty volume",
        "tenmil set volume_create name=db size_bytes=107374182400"
    ),
    order!(
        "volume_create_over",
        &[
            WHICH_STORE,
            named("name", CALLED),
            named("image", "what is read where nothing is written: a device, by its name"),
            bytes("size_bytes", Need::Optional, "how large it is, if not like the image"),
            UNIT,
            SUMS,
        ],
        "Make a volume over an image outside the store, which nobody may change",
        "tenmil set volume_create_over name=vm image=file:/srv/golden.img"
    ),
    order!(
        "volume_delete",
        &[
            WHICH_STORE,
            named("name", VOLUME),
            flag("orphan", "true to delete a snapshot even if volumes were made from it"),
            flag("if_exists", "true to succeed even if there is no such volume"),
        ],
        "Delete a volume that nobody has open, or a snapshot",
        "tenmil set volume_delete name=monday"
    ),
    order!(
        "volume_rename",
        &[WHICH_STORE, named("name", VOLUME), named("to", CALLED)],
        "Give a volume another name",
        "tenmil set volume_rename name=trial to=next"
    ),
    order!(
        "volume_resize",
        &[
            WHICH_STORE,
            named("name", VOLUME),
            bytes("size_bytes", Need::Required, "how large it is to be"),
            flag("shrink", "true to make it smaller, too, if nobody has it open"),
        ],
        "Give a volume another size; whoever it is served to is told if it has grown",
        "tenmil set volume_resize name=db size_bytes=214748364800"
    ),
    order!(
        "volume_snapshot",
        &[WHICH_STORE, named("volume", VOLUME), named("name", CALLED)],
        "Keep what a volume holds now, under a name of its own",
        "tenmil set volume_snapshot volume=db name=monday"
    ),
    order!(
        "volume_clone",
        &[WHICH_STORE, named("from", "the volume or snapshot"), named("name", CALLED)],
        "Make a volume that holds what another one, or a snapshot, holds now",
        "tenmil set volume_clone from=monday name=trial"
    ),
    order!(
        "volume_revert",
        &[WHICH_STORE, named("volume", VOLUME), named("snapshot", "the snapshot's name")],
        "Make a volume that nobody has open hold what it held when a snapshot of it was made",
        "tenmil set volume_revert volume=db snapshot=monday"
    ),
    order!(
        "store_grow",
        &[
            WHICH_STORE,
            Parameter {
                name: "add",
                kind: Kind::Text { len_max: 4096 },
                need: Need::Optional,
                help: "a device that it is to lie on, too, as the process would open it",
            },
            flag("overwrite", "true to add it even if it holds something, which is lost"),
        ],
        "Give a store what its devices have gained, or one device more",
        "tenmil set store_grow add=file:/srv/more"
    ),
    order!(
        "store_device",
        &[
            WHICH_STORE,
            Parameter {
                name: "number",
                kind: Kind::Whole { min: 1, max: u32::MAX as u64 },
                need: Need::Required,
                help: "which device, from 1 on",
            },
            named("uri", "where it is found now, as the process would open it"),
        ],
        "Write down that a device of a store, which stays open, has another name",
        "tenmil set store_device number=1 uri=file:/mnt/more"
    ),
    order!(
        "store_thresholds",
        &[
            WHICH_STORE,
            percent("first_percent", Need::Required, "tell when so much is taken; 0 for never"),
            percent("second_percent", Need::Default("0"), "and when so much is, if not 0"),
        ],
        "Change at what part of its room a store says that it fills",
        "tenmil set store_thresholds first_percent=70 second_percent=90"
    ),
    Method {
        verb: Verb::Set,
        name: "store_scrub",
        parameters: &[WHICH_STORE, RATE, UNHEARD],
        answer: Shape::Record(JOB),
        help: "Begin to read all data of a store, behind everybody else's I/O, and compare them with \
               their checksums where there are some",
        example: "tenmil set store_scrub rate_bytes=100000000",
        run: |call| begin(call, What::Scrub),
    },
    Method {
        verb: Verb::Set,
        name: "store_check",
        parameters: &[WHICH_STORE, UNHEARD],
        answer: Shape::Record(JOB),
        help: "Begin to read all metadata of a store, as of its last commit, and compare everything with \
               everything, while others go on",
        example: "tenmil set store_check",
        run: |call| begin(call, What::Check),
    },
    Method {
        verb: Verb::Set,
        name: "volume_inflate",
        parameters: &[WHICH_STORE, named("name", VOLUME), RATE, UNHEARD],
        answer: Shape::Record(JOB),
        help: "Begin to make a volume thick, or to give a thick one what it is still owed",
        example: "tenmil set volume_inflate name=db",
        run: |call| begin(call, What::Inflate(name(call))),
    },
    Method {
        verb: Verb::Set,
        name: "volume_decouple",
        parameters: &[WHICH_STORE, named("name", VOLUME), RATE, UNHEARD],
        answer: Shape::Record(JOB),
        help: "Begin to have a volume stand on its own: what it has from an image is copied",
        example: "tenmil set volume_decouple name=next",
        run: |call| begin(call, What::Decouple(name(call))),
    },
    Method {
        verb: Verb::Set,
        name: "volume_send",
        parameters: &[
            WHICH_STORE,
            named("name", "the snapshot's name in the store"),
            Parameter {
                name: "from",
                kind: Kind::Text { len_max: 4096 },
                need: Need::Optional,
                help: "only what it has that this snapshot has not",
            },
            UNHEARD,
        ],
        answer: Shape::Record(JOB),
        help: "Begin to write a snapshot, behind everybody else's I/O, to one end of a Unix stream that \
               comes beside the request",
        example: "tenmil set volume_send name=tuesday from=monday",
        run: |call| {
            let from = call.arguments.text("from").map(str::to_owned);
            begin(call, What::Send { name: name(call), from })
        },
    },
    Method {
        verb: Verb::Set,
        name: "volume_receive",
        parameters: &[WHICH_STORE, named("name", "what the snapshot is to be called"), UNHEARD],
        answer: Shape::Record(JOB),
        help: "Begin to make a snapshot, behind everybody else's I/O, of what comes from one end of a Unix \
               stream that comes beside the request",
        example: "tenmil set volume_receive name=monday",
        run: |call| begin(call, What::Receive(name(call))),
    },
    Method {
        verb: Verb::Get,
        name: "jobs",
        parameters: &[Parameter {
            name: "id",
            kind: ID,
            need: Need::Optional,
            help: "only the one with this number",
        }],
        answer: Shape::Rows(JOB),
        help: "List what takes long and was begun: how far it is, and what came of it",
        example: "tenmil get jobs --json",
        run: orders::all_jobs,
    },
    Method {
        verb: Verb::Set,
        name: "job",
        parameters: &[
            Parameter { name: "id", kind: ID, need: Need::Required, help: "its number" },
            Parameter {
                name: "stop",
                kind: Kind::Flag,
                need: Need::Required,
                help: "true to stop it: what was done stays done",
            },
        ],
        answer: Shape::Record(JOB),
        help: "Stop what takes long; an event says when it has ended",
        example: "tenmil set job id=1 stop=true",
        run: orders::stop_job,
    },
];

fn name(call: &Call<'_>) -> String {
    call.arguments.text("name").unwrap_or_default().to_owned()
}

fn begin(call: &Call<'_>, what: What) -> Result<Value, Refusal> {
    let some = |name, none| call.arguments.whole(name).filter(|value| *value != none);
    let unheard_max = some("unheard_max_ms", 0).map(Span::from_ms);
    orders::begin(call, Long { what, rate_bytes: some("rate_bytes", u64::MAX), unheard_max })
}
