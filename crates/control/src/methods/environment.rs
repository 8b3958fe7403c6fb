//! The machine that the process runs on.

use host::Environment;
use serde_json::{Value, json};

use crate::method::{Method, Verb};
use crate::shape::{Field, Shape};

const TEXT: Shape = Shape::Maybe(&Shape::Text);

pub(super) const METHODS: &[Method] = &[Method {
    verb: Verb::Get,
    name: "environment",
    parameters: &[],
    answer: Shape::Record(&[
        Field::new("processor", TEXT, "the processor's name for itself"),
        Field::new("kernel", Shape::Text, "the kernel's release"),
        Field::new("online", TEXT, "processors that are switched on"),
        Field::new("allowed", Shape::Text, "processors that the process may use"),
        Field::new("quota", Shape::Maybe(&Shape::Real), "processors' worth of time allowed"),
        Field::new("quota_file", TEXT, "the file that sets the quota"),
        Field::new("hypervisor", TEXT, "who runs the virtual machine, if it is one"),
        Field::new("governor", TEXT, "how the processor's frequency is chosen"),
        Field::new("transparent_huge_pages", TEXT, "when they are given"),
        Field::new("huge_pages_free", Shape::Whole, "explicit 2 MiB pages that nobody uses"),
        Field::new("lockable_bytes", Shape::Maybe(&Shape::Whole), "memory that may be locked"),
        Field::new("io_uring", Shape::Flag, "whether the kernel lets the process use it"),
        Field::new("io_uring_refusal", TEXT, "why it does not"),
        Field::new("shares_cores", Shape::Flag, "whether allowed processors share a core"),
        Field::new("remedies", Shape::Texts, "what to change to go faster"),
    ]),
    help: "Tell what the process runs on, and what would make it faster",
    example: "tenmil get environment",
    run: |_| Ok(environment(&Environment::read())),
}];

fn environment(found: &Environment) -> Value {
    json!({
        "processor": found.processor,
        "kernel": found.kernel,
        "online": found.online.as_ref().map(ToString::to_string),
        "allowed": found.allowed.to_string(),
        "quota": found.quota,
        "quota_file": found.quota_file,
        "hypervisor": found.hypervisor,
        "governor": found.governor,
        "transparent_huge_pages": found.transparent_huge_pages,
        "huge_pages_free": found.huge_pages_free,
        "lockable_bytes": found.lockable_bytes,
        "io_uring": found.io_uring.is_ok(),
        "io_uring_refusal": found.io_uring.as_ref().err(),
        "shares_cores": found.shares_cores,
        "remedies": found.remedies(),
    })
}
