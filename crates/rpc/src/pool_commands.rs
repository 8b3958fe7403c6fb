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

mod diff_page;
mod execute;
mod idempotency;
mod jobs;
mod missing_volume;
mod pool_command;
mod pool_json;
mod stream_fd;
mod worker_pool;

use std::sync::Arc;

use serde_json::{Map, Value};
use tenmil_base::Error;
use tenmil_drivers::pool::{OpenPool, list_open_pools};
use tenmil_linux::local_socket::LocalConnection;

use crate::deferred_reply::ReplySender;
use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::event::EventSender;
use crate::method::CallContext;
use crate::methods::mirrors_and_delays::is_uri_of_device;
use crate::metrics::StorageSampler;

pub use diff_page::{DIFFERENCE, DiffPage, range_kind as kind_of_range};
pub use execute::execute_command;
pub(crate) use jobs::EVENTS;
pub use jobs::{JOB, JobKind, JobSpec, JobStream};
pub use pool_command::PoolCommand;
pub(crate) use pool_command::{
    STORE as WHICH_STORE, boolean_parameter, name_parameter, percent_parameter,
    size_parameter as bytes,
};
pub use pool_json::{
    CommandResult, FIELDS, LISTED, STORE, VOLUME, check_json, device_json, format_bytes,
    format_devices, format_growth, format_percents, pool_json, scrub_json, transfer_json,
    volumes_json,
};

use self::jobs::Jobs;
use self::worker_pool::WorkerPool;

/// Device kinds that the program adds to those of the block layer.
pub type DeviceKinds = &'static [(&'static str, &'static dyn tenmil_block::DeviceType)];

/// Executor of commands on the pools that a process has open.
pub struct PoolCommands {
    kinds: DeviceKinds,
    announcer: EventSender,
    workers: Arc<WorkerPool>,
    jobs: Arc<Jobs>,
    sampler: Arc<StorageSampler>,
}

impl PoolCommands {
    /// Creates an executor that opens devices of these kinds and emits events through `announcer`.
    pub fn new(kinds: DeviceKinds, announcer: EventSender) -> Self {
        let jobs = Arc::new(Jobs::new(announcer.clone()));
        Self { kinds, announcer, workers: Arc::default(), jobs, sampler: Arc::default() }
    }

    /// What reads pools and mirrors for metrics, on a worker thread.
    pub(crate) fn sampler(&self) -> &Arc<StorageSampler> {
        &self.sampler
    }

    /// Executes `task` on a worker thread.
    pub(crate) fn queue_task(&self, task: Box<dyn FnOnce() + Send>) -> Result<(), RpcError> {
        self.workers.queue_task(task)
    }

    /// Executes the rest of a call on a worker thread.
    fn run_on_worker(
        &self,
        call: &CallContext<'_>,
        answer: impl FnOnce() -> Result<Value, RpcError> + Send + 'static,
    ) -> Result<Value, RpcError> {
        let (promise, pending) = ReplySender::new(self.announcer.clone());
        self.workers.queue_task(Box::new(move || promise.send_reply(answer())))?;
        call.later.defer(pending);
        Ok(Value::Null)
    }
}

impl Drop for PoolCommands {
    fn drop(&mut self) {
        self.workers.stop_workers();
        self.jobs.stop_all();
    }
}

impl std::fmt::Debug for PoolCommands {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("jobs", &self.jobs).finish_non_exhaustive()
    }
}

/// Lists all open pools.
pub(crate) fn list_pools(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let orders = pool_commands_of(call)?;
    orders.run_on_worker(call, || {
        list_open_pools().iter().map(|open| to_rpc_error(pool_json(open))).collect()
    })
}

/// Lists the volumes of a pool.
pub(crate) fn list_volumes(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let (orders, wanted) = (pool_commands_of(call)?, pool_argument(call));
    orders.run_on_worker(call, move || to_rpc_error(volumes_json(&find_pool(wanted.as_deref())?)))
}

/// Returns one page of the differences between two volumes.
pub(crate) fn volume_differences(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let (orders, wanted) = (pool_commands_of(call)?, pool_argument(call));
    let text = |name| call.arguments.text(name).unwrap_or_default().to_owned();
    let (from, to) = (text("from"), text("to"));
    let at_bytes = call.arguments.integer("at_bytes").unwrap_or_default();
    orders.run_on_worker(call, move || {
        let open = find_pool(wanted.as_deref())?;
        to_rpc_error(DiffPage::read_page(&open, (&from, &to), at_bytes))
            .map(|portion| portion.as_json())
    })
}

/// Executes the command of a method.
pub(crate) fn execute_command_of_method(
    call: &CallContext<'_>,
    method: &str,
) -> Result<Value, RpcError> {
    let (orders, wanted) = (pool_commands_of(call)?, pool_argument(call));
    let order = PoolCommand::from_arguments(method, call.arguments);
    let order = order
        .map_err(|why| RpcError::usage(ErrorCode::BadValue, format!("set {method}: {why}")))?;
    let kinds = orders.kinds;
    orders.run_on_worker(call, move || {
        let open = find_pool(wanted.as_deref())?;
        to_rpc_error(execute_command(&open, kinds, &order)).map(|reported| reported.as_json())
    })
}

/// Starts a job and returns its row.
pub(crate) fn start_job(call: &CallContext<'_>, long: JobSpec) -> Result<Value, RpcError> {
    let (orders, wanted) = (pool_commands_of(call)?, pool_argument(call));
    let stream = if long.what.has_stream() { Some(take_stream_fd(call, &long)?) } else { None };
    let (kinds, jobs) = (orders.kinds, Arc::clone(&orders.jobs));
    orders.run_on_worker(call, move || {
        let open = find_pool(wanted.as_deref())?;
        jobs.start_job(&open, kinds, long, stream)
    })
}

/// Takes the stream that was attached to a request.
fn take_stream_fd(call: &CallContext<'_>, long: &JobSpec) -> Result<LocalConnection, RpcError> {
    let (method, _) = long.start_request("");
    let given = call.passed.take_fd().ok_or_else(|| {
        std::io::Error::other("found no descriptor beside it, expected one end of a Unix stream")
    });
    given.and_then(LocalConnection::from_fd).map_err(|error| {
        let hint = "use `tenmil volume send` and `tenmil volume receive`, which bring one";
        RpcError::usage(ErrorCode::BadValue, format!("{method}: {error}")).with_hint(hint)
    })
}

/// Lists all jobs, or one.
pub(crate) fn list_jobs(call: &CallContext<'_>) -> Result<Value, RpcError> {
    Ok(pool_commands_of(call)?.jobs.job_rows(call.arguments.integer("id")))
}

/// Stops a job and returns its row.
pub(crate) fn stop_job(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let id = call.arguments.integer("id").unwrap_or_default();
    pool_commands_of(call)?.jobs.stop_job(id, call.arguments.boolean("stop") == Some(true))
}

fn pool_commands_of<'a>(call: &CallContext<'a>) -> Result<&'a PoolCommands, RpcError> {
    call.state.find_part::<PoolCommands>("pools of volumes")
}

fn pool_argument(call: &CallContext<'_>) -> Option<String> {
    call.arguments.text("pool").map(str::to_owned)
}

/// Finds a pool by device, name or UUID; without a name, the only open one.
fn find_pool(wanted: Option<&str>) -> Result<Arc<OpenPool>, RpcError> {
    let all = list_open_pools();
    let is_it = |open: &&Arc<OpenPool>| {
        let is_named =
            |wanted| is_uri_of_device(open.device_uri(), wanted) || open.name() == wanted;
        wanted.is_none_or(|wanted| is_named(wanted) || format!("{:032x}", open.uuid()) == wanted)
    };
    let mut found = all.iter().filter(is_it);
    if let (Some(open), None) = (found.next(), found.next()) {
        return Ok(Arc::clone(open));
    }
    let names: Vec<&str> = all.iter().map(|open| open.device_uri()).collect();
    let expected =
        if names.is_empty() { "one that is open".to_owned() } else { join_alternatives(&names) };
    let found = wanted.map_or_else(|| "no name".into(), quote_untrusted);
    let message = format!("pool: {found}, expected {expected}");
    Err(RpcError::usage(ErrorCode::NotFound, message).with_hint("see `tenmil get pools`"))
}

/// Converts a pool error into an RPC error.
fn to_rpc_error<T>(done: Result<T, Error>) -> Result<T, RpcError> {
    done.map_err(|error| rpc_error_of(&error))
}

pub(crate) fn rpc_error_of(error: &Error) -> RpcError {
    RpcError {
        code: ErrorCode::Failed,
        category: error.category(),
        message: error.to_string(),
        hint: error.hint().map(str::to_owned),
    }
}

/// Builds the request for a command on the pool on `device`: method name and parameters.
pub fn request_of_command(device: &str, order: &PoolCommand) -> (String, Map<String, Value>) {
    let mut parameters = order.request_parameters();
    parameters.insert("pool".into(), device.into());
    (format!("set_{}", order.method_name()), parameters)
}

#[cfg(test)]
mod tests;
