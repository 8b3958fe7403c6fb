//! Environment of the process: the machine it runs on.

use serde_json::{Value, json};
use tenmil_linux::MachineEnvironment;

use crate::method::{Method, MethodKind};
use crate::result_type::{FieldSchema, ResultType};

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "environment",
    parameters: &[],
    answer: ResultType::Record(&[
        FieldSchema::new("processor", TEXT, "processor model"),
        FieldSchema::new("kernel", ResultType::Text, "kernel release"),
        FieldSchema::new("online", TEXT, "online processors"),
        FieldSchema::new(
            "allowed",
            ResultType::Text,
            "processors in the affinity mask of the process",
        ),
        FieldSchema::new(
            "quota",
            ResultType::Maybe(&ResultType::Real),
            "CPU quota of the cgroup, in processors",
        ),
        FieldSchema::new("quota_file", TEXT, "cgroup file that sets the quota"),
        FieldSchema::new("hypervisor", TEXT, "hypervisor, if the machine is virtual"),
        FieldSchema::new("governor", TEXT, "CPU frequency governor"),
        FieldSchema::new("transparent_huge_pages", TEXT, "mode of transparent huge pages"),
        FieldSchema::new("huge_pages_free", ResultType::Whole, "free explicit 2 MiB huge pages"),
        FieldSchema::new(
            "lockable_bytes",
            ResultType::Maybe(&ResultType::Whole),
            "limit of locked memory",
        ),
        FieldSchema::new(
            "io_uring",
            ResultType::Flag,
            "whether io_uring is available to the process",
        ),
        FieldSchema::new("io_uring_refusal", TEXT, "why io_uring is unavailable"),
        FieldSchema::new(
            "shares_cores",
            ResultType::Flag,
            "whether allowed processors are SMT siblings",
        ),
        FieldSchema::new(
            "remedies",
            ResultType::Texts,
            "recommended changes for better performance",
        ),
    ]),
    help: "Show the environment of the process and recommended changes",
    example: "tenmil get environment",
    run: |_| Ok(environment_json(&MachineEnvironment::read())),
}];

fn environment_json(found: &MachineEnvironment) -> Value {
    json!({
        "processor": found.cpu_model,
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
        "remedies": found.recommendations(),
    })
}
