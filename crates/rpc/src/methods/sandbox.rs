//! Rights that the process has dropped.

use serde_json::{Value, json};
use tenmil_linux::sandbox::{self, DeniedCall, Measure, SandboxReport};

use crate::event::{Event, EventKind, EventSender};
use crate::method::{Method, MethodKind};
use crate::result_type::{FieldSchema, ResultType};

const APPLIED: EventKind =
    EventKind { name: "sandbox", help: "the process has dropped the rights that it does not need" };
const DENIED: EventKind = EventKind {
    name: "system-call-denied",
    help: "the system call filter of the process denied a call",
};

pub(super) const EVENTS: &[EventKind] = &[APPLIED, DENIED];

const MEASURE_STATES: &str = "in force, only reported, unavailable or off";

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "sandbox",
    parameters: &[],
    answer: ResultType::Record(&[
        FieldSchema::new("uid", ResultType::Whole, "user that the process runs as"),
        FieldSchema::new("capabilities", ResultType::Text, MEASURE_STATES),
        FieldSchema::new("capabilities_kept", ResultType::Texts, "capabilities that it still has"),
        FieldSchema::new("bounding_set", ResultType::Text, MEASURE_STATES),
        FieldSchema::new("no_new_privs", ResultType::Text, MEASURE_STATES),
        FieldSchema::new("seccomp", ResultType::Text, MEASURE_STATES),
        FieldSchema::new("call_groups", ResultType::Texts, "groups of system calls it may make"),
        FieldSchema::new("calls", ResultType::Texts, "system calls that it may make"),
        FieldSchema::new(
            "calls_denied",
            ResultType::Rows(&[
                FieldSchema::new("call", ResultType::Text, "system call"),
                FieldSchema::new("count", ResultType::Whole, "how many times"),
            ]),
            "system calls that the filter denied",
        ),
        FieldSchema::new("landlock", ResultType::Text, MEASURE_STATES),
        FieldSchema::new(
            "landlock_abi",
            ResultType::Maybe(&ResultType::Whole),
            "version of the kernel's Landlock interface",
        ),
        FieldSchema::new(
            "paths",
            ResultType::Rows(&[
                FieldSchema::new("path", ResultType::Text, "file or directory"),
                FieldSchema::new("access", ResultType::Text, "read, read-write or remove"),
            ]),
            "paths that it may open",
        ),
        FieldSchema::new(
            "tcp_bind",
            ResultType::Flag,
            "whether it may listen at further TCP ports",
        ),
        FieldSchema::new("tcp_connect", ResultType::Flag, "whether it may open TCP connections"),
        FieldSchema::new("threads", ResultType::Whole, "threads that were restricted"),
        FieldSchema::new(
            "kernel_threads",
            ResultType::Whole,
            "kernel threads of io_uring that keep the rights of the start",
        ),
        FieldSchema::new(
            "obstacles",
            ResultType::Texts,
            "measures that are unavailable, with the reason",
        ),
    ]),
    help: "Show the rights that the process has dropped",
    example: "tenmil get sandbox",
    run: |_| Ok(report_json(sandbox::report(), &sandbox::denied_calls())),
}];

fn report_json(report: Option<&SandboxReport>, denied: &[DeniedCall]) -> Value {
    let uid = tenmil_linux::runtime_directory::current_uid();
    let state =
        |of: fn(&SandboxReport) -> &Measure| report.map_or("off", |report| of(report).name());
    let kept = sandbox::thread_capabilities().unwrap_or_default().permitted;
    let paths = report.map_or(&[][..], |report| &report.paths).iter().map(
        |rule| json!({ "path": rule.path.display().to_string(), "access": rule.access.name() }),
    );
    let groups = report.iter().flat_map(|report| &report.calls.groups).map(|group| group.name());
    let denied = denied.iter().map(|one| json!({ "call": one.name, "count": one.count }));
    json!({
        "uid": uid,
        "capabilities": state(|report| &report.dropped_capabilities),
        "capabilities_kept": kept.names(),
        "bounding_set": state(|report| &report.bounding_set),
        "no_new_privs": state(|report| &report.no_new_privileges),
        "seccomp": state(|report| &report.seccomp),
        "call_groups": groups.collect::<Vec<_>>(),
        "calls": report.map(|report| report.calls.names()).unwrap_or_default(),
        "calls_denied": denied.collect::<Vec<_>>(),
        "landlock": state(|report| &report.landlock),
        "landlock_abi": report.and_then(|report| report.landlock_abi),
        "paths": paths.collect::<Vec<_>>(),
        "tcp_bind": report.is_none_or(|report| !report.network.denies_bind),
        "tcp_connect": report.is_none_or(|report| !report.network.denies_connect),
        "threads": report.map_or(0, |report| report.threads),
        "kernel_threads": report.map_or(0, |report| report.kernel_threads),
        "obstacles": report.map(SandboxReport::obstacles).unwrap_or_default(),
    })
}

impl EventSender {
    /// Emits an event for dropped rights; `text` is its line.
    pub fn emit_sandbox_event(&self, report: &SandboxReport, text: String) {
        self.emit(Event { kind: APPLIED, text, about: report_json(Some(report), &[]) });
    }

    /// Emits an event for a denied system call.
    pub fn emit_denied_call(&self, denied: &DeniedCall) {
        let about = json!({ "call": denied.name, "count": denied.count });
        let text = format!("system call {} was denied", denied.name);
        self.emit(Event { kind: DENIED, text, about });
    }
}

#[cfg(test)]
mod tests {
    use tenmil_linux::sandbox::{
        AllowedCalls, CallGroup, CapabilitySet, DeniedCall, Measure, NetworkRules, PathAccess,
        PathRule, SandboxReport, SocketFamilies,
    };

    use super::{METHODS, report_json};
    use crate::event::event_channel;

    fn test_report() -> SandboxReport {
        SandboxReport {
            capabilities: CapabilitySet::NET_ADMIN,
            dropped_capabilities: Measure::InForce,
            bounding_set: Measure::Unavailable("the process has no CAP_SETPCAP".into()),
            no_new_privileges: Measure::InForce,
            seccomp: Measure::InForce,
            calls: AllowedCalls {
                groups: vec![CallGroup::Process, CallGroup::IoUring],
                families: SocketFamilies::default(),
            },
            landlock: Measure::Unavailable("the kernel has no Landlock".into()),
            landlock_abi: None,
            paths: vec![PathRule { path: "/a".into(), access: PathAccess::ReadWrite }],
            network: NetworkRules { denies_bind: true, denies_connect: false },
            threads: 3,
            kernel_threads: 1,
        }
    }

    #[test]
    fn report_names_what_is_in_force_and_why_the_rest_is_not() {
        let denied = [DeniedCall { name: "ptrace".into(), count: 2 }];
        let answer = report_json(Some(&test_report()), &denied);
        assert_eq!(METHODS[0].answer.check_value(&answer), Ok(()));
        assert_eq!(
            (&answer["seccomp"], &answer["landlock"]),
            (&"in force".into(), &"unavailable".into())
        );
        assert_eq!(answer["call_groups"], serde_json::json!(["process", "io_uring"]));
        assert_eq!(
            answer["obstacles"],
            serde_json::json!(["Landlock: the kernel has no Landlock"])
        );
        assert_eq!(answer["paths"][0]["access"], "read-write");
        assert_eq!(answer["calls_denied"][0]["call"], "ptrace");
        assert_eq!((&answer["tcp_bind"], &answer["tcp_connect"]), (&false.into(), &true.into()));
    }

    #[test]
    fn process_without_a_sandbox_is_off_everywhere() {
        let answer = report_json(None, &[]);
        assert_eq!(METHODS[0].answer.check_value(&answer), Ok(()));
        assert_eq!((&answer["seccomp"], &answer["tcp_bind"]), (&"off".into(), &true.into()));
    }

    #[test]
    fn events_name_the_denied_call_and_the_dropped_rights() {
        let (sender, events) = event_channel().unwrap();
        sender.emit_denied_call(&DeniedCall { name: "ptrace".into(), count: 1 });
        sender.emit_sandbox_event(&test_report(), "sandbox: …".into());
        let denied = events.next().unwrap();
        assert_eq!(
            (denied.kind.name, &denied.about["call"]),
            ("system-call-denied", &"ptrace".into())
        );
        assert_eq!(events.next().unwrap().about["landlock"], "unavailable");
    }
}
