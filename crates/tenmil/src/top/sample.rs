//! What a process tells of itself, as plain values: the answers of its methods `process`, `sample`
//! and `scheduler`, checked and not believed.

use control::Refusal;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::words::plain;
use crate::Refused;

/// All reactors, threads and pollers of a process, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Sample {
    pub(crate) at_ns: u64,
    pub(crate) reactors: Vec<Reactor>,
    pub(crate) threads: Vec<Thread>,
    pub(crate) pollers: Vec<Poller>,
}

/// One reactor. Counters begin with it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Reactor {
    pub(crate) id: u32,
    pub(crate) core: u32,
    pub(crate) mode: String,
    pub(crate) asleep: bool,
    pub(crate) busy_ns: u64,
    pub(crate) turns: u64,
    pub(crate) sleeps: u64,
    pub(crate) messages: u64,
    pub(crate) moves: u64,
    pub(crate) turns_too_long: u64,
    pub(crate) longest_turn_ns: u64,
    pub(crate) longest_culprit: Option<String>,
    pub(crate) running: Option<String>,
}

/// One light thread.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Thread {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) reactor: u32,
    pub(crate) mask: Option<String>,
    pub(crate) busy_ns: u64,
    pub(crate) messages: u64,
    pub(crate) moves: u64,
    pub(crate) channels: u64,
}

/// One poller.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Poller {
    pub(crate) thread_id: u32,
    pub(crate) name: String,
    pub(crate) wake: String,
    pub(crate) every_ns: Option<u64>,
    pub(crate) paused: bool,
    pub(crate) polls: u64,
    pub(crate) found: u64,
}

/// The process.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Process {
    pub(crate) version: String,
    pub(crate) pid: u32,
    pub(crate) command_line: Vec<String>,
    pub(crate) uptime_ns: Option<u64>,
}

/// What is shown of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct Scheduler {
    pub(crate) policy: String,
}

/// Reads the answer of `method`. Members that are not known are passed over: a newer process may
/// say more.
pub(crate) fn read<T: DeserializeOwned>(method: &str, answer: Value) -> Result<T, Refused> {
    serde_json::from_value(answer).map_err(|error| {
        let found = plain(&error.to_string());
        Refused::peer(format!("{method}: {found}, expected what this version answers"))
            .with_hint("use the `tenmil top` of the process's own version")
    })
}

/// A refusal of the serving side, or of the client, as one of ours.
pub(crate) fn refused(refusal: Refusal) -> Refused {
    let Refusal { blame, message, hint, .. } = refusal;
    Refused { blame, text: plain(&message), hint: hint.map(|hint| plain(&hint)) }
}

#[cfg(test)]
mod tests {
    use base::Blame;
    use serde_json::json;

    use super::{Process, Sample, read};

    #[test]
    fn what_is_not_known_is_passed_over_and_what_is_missing_is_the_peers_doing() {
        let answer = json!({
            "at_ns": 5, "reactors": [], "threads": [], "weather": "fine",
            "pollers": [{
                "thread": "a", "thread_id": 1, "name": "p", "wake": "deadline", "every_ns": null,
                "paused": false, "polls": 3, "found": 2, "mood": 1,
            }],
        });
        let sample: Sample = read("sample", answer).unwrap();
        assert_eq!((sample.at_ns, sample.pollers[0].polls), (5, 3));
        let refused = read::<Sample>("sample", json!({ "at_ns": -1 })).unwrap_err();
        assert_eq!(refused.blame, Blame::Peer);
        assert!(refused.text.starts_with("sample: ") && refused.hint.is_some(), "{refused}");
        assert!(read::<Process>("process", json!([])).is_err());
    }
}
