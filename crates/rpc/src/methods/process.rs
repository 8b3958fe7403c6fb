//! The process itself.

use serde_json::{Value, json};
use tenmil_linux::process_log::ProcessLog;
use tenmil_linux::process_stats::{ProcessStats, command_line};

use crate::error::RpcError;
use crate::method::{CallContext, Method, MethodKind};
use crate::result_type::{FieldSchema, ResultType};

/// Properties of the program.
#[derive(Clone, Debug)]
pub struct ProgramInfo {
    /// Version.
    pub version: &'static str,
    /// Log, if it has one.
    pub log: Option<ProcessLog>,
}

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "process",
    parameters: &[],
    answer: ResultType::Record(&[
        FieldSchema::new("version", ResultType::Text, "program version"),
        FieldSchema::new("pid", ResultType::Whole, "process identifier"),
        FieldSchema::new("command_line", ResultType::Texts, "command line"),
        FieldSchema::new("uptime_ns", WHOLE, "time since the start"),
        FieldSchema::new("processor_time_ns", ResultType::Whole, "CPU time of all threads"),
        FieldSchema::new("resident_bytes", WHOLE, "resident memory"),
        FieldSchema::new("resident_max_bytes", WHOLE, "peak resident memory"),
        FieldSchema::new("descriptors", WHOLE, "open file descriptors"),
        FieldSchema::new("threads", WHOLE, "threads"),
        FieldSchema::new("log_lines_written", WHOLE, "log lines written"),
        FieldSchema::new("log_lines_suppressed", WHOLE, "log lines suppressed by a rate limit"),
        FieldSchema::new(
            "log_lines_dropped",
            WHOLE,
            "log lines lost because the log was not read in time or could not be written",
        ),
    ]),
    help: "Show the process and its resource usage",
    example: "tenmil get process",
    run: process_method,
}];

fn process_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let ProgramInfo { version, log } = call.state.find_part("word about itself")?;
    let lines = log.as_ref().map(ProcessLog::counters);
    let (usage, pid) = (ProcessStats::read(), std::process::id());
    Ok(json!({
        "version": version,
        "pid": pid,
        "command_line": command_line(pid).unwrap_or_default(),
        "uptime_ns": usage.age.map(|age| age.ns),
        "processor_time_ns": usage.cpu_time.ns,
        "resident_bytes": usage.resident_bytes,
        "resident_max_bytes": usage.resident_max_bytes,
        "descriptors": usage.descriptors,
        "threads": usage.threads,
        "log_lines_written": lines.map(|lines| lines.written),
        "log_lines_suppressed": lines.map(|lines| lines.suppressed),
        "log_lines_dropped": lines.map(|lines| lines.dropped),
    }))
}
