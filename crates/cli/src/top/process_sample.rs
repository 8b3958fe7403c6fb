//! Samples of a process: validated results of its methods `process`, `sample` and `scheduler`.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tenmil_rpc::RpcError;

use super::format::escape;
use tenmil_base::Error;

/// Reactors, threads and pollers of a process at one moment.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct ProcessSample {
    pub(crate) monotonic_ns: u64,
    pub(crate) reactors: Vec<ReactorSample>,
    pub(crate) threads: Vec<ThreadSample>,
    pub(crate) pollers: Vec<PollerSample>,
}

/// Reactor with its counters since its start.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct ReactorSample {
    pub(crate) id: u32,
    pub(crate) core: u32,
    pub(crate) mode: String,
    pub(crate) sleeping: bool,
    pub(crate) busy_ns: u64,
    pub(crate) iterations: u64,
    pub(crate) sleeps: u64,
    pub(crate) messages: u64,
    pub(crate) migrations: u64,
    pub(crate) iterations_too_long: u64,
    pub(crate) longest_iteration_ns: u64,
    pub(crate) longest_iteration_cause: Option<String>,
    pub(crate) running: Option<String>,
}

/// Lightweight thread with its counters.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct ThreadSample {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) reactor: u32,
    pub(crate) mask: Option<String>,
    pub(crate) busy_ns: u64,
    pub(crate) messages: u64,
    pub(crate) migrations: u64,
    pub(crate) channels: u64,
}

/// Poller with its counters.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct PollerSample {
    pub(crate) thread_id: u32,
    pub(crate) name: String,
    pub(crate) wake: String,
    pub(crate) every_ns: Option<u64>,
    pub(crate) paused: bool,
    pub(crate) polls: u64,
    pub(crate) found: u64,
}

/// Properties of the process.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct ProcessInfo {
    pub(crate) version: String,
    pub(crate) pid: u32,
    pub(crate) command_line: Vec<String>,
    pub(crate) uptime_ns: Option<u64>,
}

/// Properties of the scheduler that are shown.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct SchedulerInfo {
    pub(crate) policy: String,
}

/// Parses the result of `method`. Unknown members are ignored, because a newer process may send more.
pub(crate) fn parse_result<T: DeserializeOwned>(method: &str, result: Value) -> Result<T, Error> {
    serde_json::from_value(result).map_err(|error| {
        let found = escape(&error.to_string());
        Error::remote(format!("{method}: {found}, expected the result of this version"))
            .with_hint("use the `tenmil top` of the process's own version")
    })
}

/// Converts an RPC error to a command error.
pub(crate) fn command_error(refusal: RpcError) -> Error {
    let RpcError { category, message, hint, .. } = refusal;
    Error { category, text: escape(&message), hint: hint.map(|hint| escape(&hint)) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tenmil_base::ErrorCategory;

    use super::{ProcessInfo, ProcessSample, parse_result};

    #[test]
    fn unknown_member_is_ignored_and_a_missing_one_is_a_remote_error() {
        let result = json!({
            "monotonic_ns": 5, "reactors": [], "threads": [], "weather": "fine",
            "pollers": [{
                "thread": "a", "thread_id": 1, "name": "p", "wake": "deadline", "every_ns": null,
                "paused": false, "polls": 3, "found": 2, "mood": 1,
            }],
        });
        let sample: ProcessSample = parse_result("sample", result).unwrap();
        assert_eq!((sample.monotonic_ns, sample.pollers[0].polls), (5, 3));
        let refused =
            parse_result::<ProcessSample>("sample", json!({ "monotonic_ns": -1 })).unwrap_err();
        assert_eq!(refused.category, ErrorCategory::Remote);
        assert!(refused.text.starts_with("sample: ") && refused.hint.is_some(), "{refused}");
        assert!(parse_result::<ProcessInfo>("process", json!([])).is_err());
    }
}
