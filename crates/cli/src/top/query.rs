//! Queries to the watched process.

use serde_json::{Map, Value};
use tenmil_base::{Error, Span};
use tenmil_rpc::{Client, Code, RpcError};

use super::sample::{Process, Sample, Scheduler, read, refused};

/// Response time after which a process counts as not responding.
pub(crate) const TIME_LIMIT: Span = Span::from_secs(1);

/// Calls a method without parameters.
pub(crate) fn call(client: &mut Client, method: &str) -> Result<Value, RpcError> {
    client.call(method, Map::new(), TIME_LIMIT)
}

/// Queries the properties of the process.
pub(crate) fn process(client: &mut Client) -> Result<Process, Error> {
    read("process", call(client, "process").map_err(refused)?)
}

/// Parses the result of `sample`.
pub(crate) fn sample(result: Value) -> Result<Sample, Error> {
    read("sample", result)
}

/// Queries the scheduling policy; `None` if the process has no scheduler.
pub(crate) fn policy(client: &mut Client) -> Result<Option<String>, RpcError> {
    match call(client, "scheduler") {
        Ok(result) => Ok(read::<Scheduler>("scheduler", result).ok().map(|it| it.policy)),
        Err(refusal) if matches!(refusal.code, Code::NotFound | Code::NoSuchMethod) => Ok(None),
        Err(refusal) => Err(refusal),
    }
}
