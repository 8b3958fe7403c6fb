//! Queries to the watched process.

use serde_json::{Map, Value};
use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_rpc::{ErrorCode, RpcClient, RpcError};

use super::process_sample::{
    ProcessInfo, ProcessSample, SchedulerInfo, command_error, parse_result,
};
use crate::io_rates::{Grouping, IoSample};

/// Response time after which a process counts as not responding.
pub(crate) const TIME_LIMIT: Span = Span::from_secs(1);

/// Calls a method without parameters.
pub(crate) fn call_method(client: &mut RpcClient, method: &str) -> Result<Value, RpcError> {
    client.call_method(method, Map::new(), TIME_LIMIT)
}

/// Queries the properties of the process.
pub(crate) fn query_process(client: &mut RpcClient) -> Result<ProcessInfo, Error> {
    parse_result("process", call_method(client, "process").map_err(command_error)?)
}

/// Parses the result of `sample`.
pub(crate) fn parse_sample(result: Value) -> Result<ProcessSample, Error> {
    parse_result("sample", result)
}

/// Queries the scheduling policy; `None` if the process has no scheduler.
pub(crate) fn query_scheduler_policy(client: &mut RpcClient) -> Result<Option<String>, RpcError> {
    match call_method(client, "scheduler") {
        Ok(result) => {
            Ok(parse_result::<SchedulerInfo>("scheduler", result).ok().map(|it| it.policy))
        }
        Err(refusal) if matches!(refusal.code, ErrorCode::NotFound | ErrorCode::NoSuchMethod) => {
            Ok(None)
        }
        Err(refusal) => Err(refusal),
    }
}

/// Queries the I/O statistics; a process that serves nothing has no rows.
pub(crate) fn query_io(
    client: &mut RpcClient,
    clock: &Clock,
    grouping: Grouping,
) -> Result<IoSample, RpcError> {
    let rows = match client.call_method("io_statistics", grouping.parameters(), TIME_LIMIT) {
        Err(refusal) if matches!(refusal.code, ErrorCode::NotFound | ErrorCode::NoSuchMethod) => {
            Value::Array(Vec::new())
        }
        result => result?,
    };
    Ok(IoSample::new(clock.now(), &rows))
}
