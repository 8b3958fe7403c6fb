//! What a process is asked, a question at a time.

use base::Span;
use control::{Client, Code, Refusal};
use serde_json::{Map, Value};

use super::sample::{Process, Sample, Scheduler, read, refused};
use crate::Refused;

/// How long a process may take to answer before it is said to be silent.
pub(crate) const PATIENCE: Span = Span::from_secs(1);

/// Asks a question that has no parameters.
pub(crate) fn call(client: &mut Client, method: &str) -> Result<Value, Refusal> {
    client.call(method, Map::new(), PATIENCE)
}

/// Asks who it is.
pub(crate) fn process(client: &mut Client) -> Result<Process, Refused> {
    read("process", call(client, "process").map_err(refused)?)
}

/// Reads what `sample` answers.
pub(crate) fn sample(answer: Value) -> Result<Sample, Refused> {
    read("sample", answer)
}

/// Asks how it spreads its threads. One that cannot say has no scheduler.
pub(crate) fn policy(client: &mut Client) -> Result<Option<String>, Refusal> {
    match call(client, "scheduler") {
        Ok(answer) => Ok(read::<Scheduler>("scheduler", answer).ok().map(|it| it.policy)),
        Err(refusal) if matches!(refusal.code, Code::Absent | Code::NoSuchMethod) => Ok(None),
        Err(refusal) => Err(refusal),
    }
}
