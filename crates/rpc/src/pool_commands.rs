//! Commands on the pools that a process has open.
//!
//! ```text
//!   program with the pool open:   execute(command)                   on its own thread
//!   any other process:     set_volume_…  ->  worker: execute(command)  ->  deferred response
//!                          set_pool_scrub -> job on a thread of its own; queried with `jobs`
//! ```
//!
//! Syntax, errors and results are the same in both cases, because the same function executes the
//! command. The thread that serves the socket never executes commands: a command waits for metadata
//! to become durable, and a device may be slow. [`PoolCommands`] is the state that a process keeps
//! for this; it is dropped with the socket, which stops running jobs.

mod command;
mod describe;
mod diff;
mod execute;
mod idempotent;
mod jobs;
mod similar;
mod stream_fd;
mod workers;

use std::sync::Arc;

use serde_json::{Map, Value};
use tenmil_base::Error;
use tenmil_drivers::pool::{OpenPool, open_pools};
use tenmil_linux::local_socket::Connection;

use crate::deferred::ReplySender;
use crate::error::{Code, RpcError, either, quoted};
use crate::event::EventSender;
use crate::method::CallContext;
use crate::methods::devices::is_device;

pub use command::PoolCommand;
pub(crate) use command::{STORE as WHICH_STORE, flag, named, percent, size as bytes};
pub use describe::{
    CommandResult, FIELDS, LISTED, STORE, VOLUME, carried, checked, device, devices_text,
    grown_text, percents, scrubbed, size, store, volumes,
};
pub use diff::{DIFFERENCE, DiffPage, kind as kind_of_range};
pub use execute::execute;
pub(crate) use jobs::EVENTS;
pub use jobs::{JOB, JobData, JobKind, JobSpec};

use self::jobs::Jobs;
use self::workers::WorkerPool;

/// Device kinds that the program adds to those of the block layer.
pub type DeviceKinds = &'static [(&'static str, &'static dyn tenmil_block::DeviceType)];

/// Executor of commands on the pools that a process has open.
pub struct PoolCommands {
    kinds: DeviceKinds,
    announcer: EventSender,
    workers: Arc<WorkerPool>,
    jobs: Arc<Jobs>,
}

impl PoolCommands {
    /// Creates an executor that opens devices of these kinds and emits events through `announcer`.
    pub fn new(kinds: DeviceKinds, announcer: EventSender) -> Self {
        let jobs = Arc::new(Jobs::new(announcer.clone()));
        Self { kinds, announcer, workers: Arc::default(), jobs }
    }

    /// Executes the rest of a call on a worker thread.
    fn reply_later(
        &self,
        call: &CallContext<'_>,
        answer: impl FnOnce() -> Result<Value, RpcError> + Send + 'static,
    ) -> Result<Value, RpcError> {
        let (promise, pending) = ReplySender::new(self.announcer.clone());
        self.workers.spawn(Box::new(move || promise.keep(answer())))?;
        call.later.defer(pending);
        Ok(Value::Null)
    }
}

impl Drop for PoolCommands {
    fn drop(&mut self) {
        self.workers.end();
        self.jobs.end();
    }
}

impl std::fmt::Debug for PoolCommands {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("jobs", &self.jobs).finish_non_exhaustive()
    }
}

/// Lists all open pools.
pub(crate) fn all_stores(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let orders = orders(call)?;
    orders.reply_later(call, || open_pools().iter().map(|open| to_rpc_error(store(open))).collect())
}

/// Lists the volumes of a pool.
pub(crate) fn all_volumes(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    orders.reply_later(call, move || to_rpc_error(volumes(&find(wanted.as_deref())?)))
}

/// Returns one page of the differences between two volumes.
pub(crate) fn differ(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let text = |name| call.arguments.text(name).unwrap_or_default().to_owned();
    let (from, to) = (text("from"), text("to"));
    let at_bytes = call.arguments.whole("at_bytes").unwrap_or_default();
    orders.reply_later(call, move || {
        let open = find(wanted.as_deref())?;
        to_rpc_error(DiffPage::of(&open, (&from, &to), at_bytes)).map(|portion| portion.as_json())
    })
}

/// Executes the command of a method.
pub(crate) fn give(call: &CallContext<'_>, method: &str) -> Result<Value, RpcError> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let order = PoolCommand::read(method, call.arguments);
    let order =
        order.map_err(|why| RpcError::caller(Code::BadValue, format!("set {method}: {why}")))?;
    let kinds = orders.kinds;
    orders.reply_later(call, move || {
        let open = find(wanted.as_deref())?;
        to_rpc_error(execute(&open, kinds, &order)).map(|told| told.as_json())
    })
}

/// Starts a job and returns its row.
pub(crate) fn begin(call: &CallContext<'_>, long: JobSpec) -> Result<Value, RpcError> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let stream = if long.what.has_stream() { Some(stream(call, &long)?) } else { None };
    let (kinds, jobs) = (orders.kinds, Arc::clone(&orders.jobs));
    orders.reply_later(call, move || {
        let open = find(wanted.as_deref())?;
        jobs.begin(&open, kinds, long, stream)
    })
}

/// Takes the stream that was attached to a request.
fn stream(call: &CallContext<'_>, long: &JobSpec) -> Result<Connection, RpcError> {
    let (method, _) = long.request("");
    let given = call.passed.take().ok_or_else(|| {
        std::io::Error::other("found no descriptor beside it, expected one end of a Unix stream")
    });
    given.and_then(Connection::from_fd).map_err(|error| {
        let hint = "use `tenmil volume send` and `tenmil volume receive`, which bring one";
        RpcError::caller(Code::BadValue, format!("{method}: {error}")).with_hint(hint)
    })
}

/// Lists all jobs, or one.
pub(crate) fn all_jobs(call: &CallContext<'_>) -> Result<Value, RpcError> {
    Ok(orders(call)?.jobs.rows(call.arguments.whole("id")))
}

/// Stops a job and returns its row.
pub(crate) fn stop_job(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let id = call.arguments.whole("id").unwrap_or_default();
    orders(call)?.jobs.stop(id, call.arguments.flag("stop") == Some(true))
}

fn orders<'a>(call: &CallContext<'a>) -> Result<&'a PoolCommands, RpcError> {
    call.state.part::<PoolCommands>("pools of volumes")
}

fn wanted(call: &CallContext<'_>) -> Option<String> {
    call.arguments.text("pool").map(str::to_owned)
}

/// Finds a pool by device, name or UUID; without a name, the only open one.
fn find(wanted: Option<&str>) -> Result<Arc<OpenPool>, RpcError> {
    let all = open_pools();
    let is_it = |open: &&Arc<OpenPool>| {
        let is_named = |wanted| is_device(open.device_uri(), wanted) || open.name() == wanted;
        wanted.is_none_or(|wanted| is_named(wanted) || format!("{:032x}", open.uuid()) == wanted)
    };
    let mut found = all.iter().filter(is_it);
    if let (Some(open), None) = (found.next(), found.next()) {
        return Ok(Arc::clone(open));
    }
    let names: Vec<&str> = all.iter().map(|open| open.device_uri()).collect();
    let expected = if names.is_empty() { "one that is open".to_owned() } else { either(&names) };
    let found = wanted.map_or_else(|| "no name".into(), quoted);
    let message = format!("pool: {found}, expected {expected}");
    Err(RpcError::caller(Code::NotFound, message).with_hint("see `tenmil get pools`"))
}

/// Converts a pool error into an RPC error.
fn to_rpc_error<T>(done: Result<T, Error>) -> Result<T, RpcError> {
    done.map_err(|error| refusal(&error))
}

pub(crate) fn refusal(error: &Error) -> RpcError {
    RpcError {
        code: Code::Failed,
        category: error.category(),
        message: error.to_string(),
        hint: error.hint().map(str::to_owned),
    }
}

/// Builds the request for a command on the pool on `device`: method name and parameters.
pub fn request(device: &str, order: &PoolCommand) -> (String, Map<String, Value>) {
    let mut parameters = order.parameters();
    parameters.insert("pool".into(), device.into());
    (format!("set_{}", order.method()), parameters)
}

#[cfg(test)]
mod tests;
