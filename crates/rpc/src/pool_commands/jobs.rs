//! Jobs: long-running operations, each on a thread of its own, with progress and cancellation.

use std::fmt;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde_json::{Map, Value, json};
use tenmil_base::Error;
use tenmil_base::{Counter, ErrorCategory, Span};
use tenmil_drivers::pool::{DecoupleResult, InflateResult, OpenPool, PAGE_BYTES};
use tenmil_linux::local_socket::LocalConnection;
use tenmil_linux::{Clock, NamedThread, StopFlag};

use super::stream_fd::StreamFd;
use super::{
    CommandResult, DeviceKinds, check_json, format_bytes, rpc_error_of, scrub_json, transfer_json,
    worker_pool,
};
use crate::error::{ErrorCode, RpcError};
use crate::event::{Event, EventKind, EventSender};
use crate::result_type::{FieldSchema, ResultType};

/// Specification of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSpec {
    /// Operation.
    pub what: JobKind,
    /// Rate limit in bytes per second.
    pub rate_bytes: Option<u64>,
    /// Time without a query for the job after which it is stopped.
    pub unheard_max: Option<Span>,
}

/// Operation of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Read all data of a pool and verify their checksums.
    Scrub,
    /// Read all metadata of a pool and check their consistency.
    Check,
    /// Reserve space for all blocks of the volume.
    Inflate(String),
    /// Detach the volume from its parent image and snapshots.
    Decouple(String),
    /// Send a snapshot as a stream.
    Send {
        /// Name.
        name: String,
        /// Base snapshot of an incremental stream.
        from: Option<String>,
    },
    /// Create a snapshot of this name from a stream.
    Receive(String),
}

/// Data that a job writes or reads, besides the pool.
pub enum JobStream<'a> {
    /// None.
    Nothing,
    /// Written by the job.
    Out(&'a mut dyn Write),
    /// Read by the job.
    In(&'a mut dyn Read),
}

/// Members of a job description.
pub const JOB: &[FieldSchema] = &[
    FieldSchema::new("id", ResultType::Whole, "identifier, never reused"),
    FieldSchema::new(
        "what",
        ResultType::Text,
        "kind: scrub, check, inflate, decouple, send or receive",
    ),
    FieldSchema::new("pool", ResultType::Text, "device of the pool"),
    FieldSchema::new("volume", ResultType::Maybe(&ResultType::Text), "volume of the job"),
    FieldSchema::new("state", ResultType::Text, "state: running, done, refused or stopped"),
    FieldSchema::new("done_bytes", ResultType::Whole, "bytes processed"),
    FieldSchema::new("size_bytes", ResultType::Whole, "total bytes; zero until known"),
    FieldSchema::new(
        "rate_bytes",
        ResultType::Maybe(&ResultType::Whole),
        "rate limit in bytes per second",
    ),
    FieldSchema::new("age_ns", ResultType::Whole, "time since the start of the job"),
    FieldSchema::new(
        "result",
        ResultType::Maybe(&ResultType::Object),
        "result, if queried by identifier",
    ),
    FieldSchema::new(
        "refusal",
        ResultType::Maybe(&ResultType::Object),
        "error: code, category, message, hint",
    ),
];

const ENDED: EventKind =
    EventKind { name: "job-ended", help: "a job of a pool completed, failed or was stopped" };

pub(crate) const EVENTS: &[EventKind] = &[ENDED];

/// Jobs of a process.
pub(super) struct Jobs {
    announcer: EventSender,
    clock: Clock,
    table: Mutex<JobTable>,
}

#[derive(Default)]
struct JobTable {
    /// Jobs, oldest first.
    jobs: Vec<Arc<Job>>,
    threads: Vec<NamedThread<()>>,
    next_id: u64,
    is_over: bool,
}

struct Job {
    id: u64,
    store: String,
    long: JobSpec,
    clock: Clock,
    began_ns: u64,
    /// Time of the last query.
    queried_ns: AtomicU64,
    done_bytes: Counter,
    size_bytes: Counter,
    is_stopped: AtomicBool,
    end: OnceLock<JobResult>,
}

/// Result of a job, set once.
struct JobResult {
    state: &'static str,
    outcome: Result<Value, RpcError>,
}

/// Largest number of running jobs.
const RUNNING_MAX: usize = 4;
/// Largest number of remembered jobs, including running ones.
const JOBS_MAX: usize = 16;

impl JobKind {
    const fn name(&self) -> &'static str {
        match self {
            Self::Scrub => "scrub",
            Self::Check => "check",
            Self::Inflate(_) => "inflate",
            Self::Decouple(_) => "decouple",
            Self::Send { .. } => "send",
            Self::Receive(_) => "receive",
        }
    }

    /// Whether the job sends or receives a stream.
    pub(super) const fn has_stream(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Receive(_))
    }

    fn volume_name(&self) -> Option<&str> {
        match self {
            Self::Scrub | Self::Check => None,
            Self::Inflate(name)
            | Self::Decouple(name)
            | Self::Send { name, .. }
            | Self::Receive(name) => Some(name),
        }
    }
}

impl JobSpec {
    /// Request that starts the job on the pool on this device.
    pub fn start_request(&self, device: &str) -> (String, Map<String, Value>) {
        let method = match self.what {
            JobKind::Scrub => "set_pool_scrub",
            JobKind::Check => "set_pool_check",
            JobKind::Inflate(_) => "set_volume_inflate",
            JobKind::Decouple(_) => "set_volume_decouple",
            JobKind::Send { .. } => "set_volume_send",
            JobKind::Receive(_) => "set_volume_receive",
        };
        let mut given = Map::new();
        given.insert("pool".into(), device.into());
        let mut give = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                given.insert(name.into(), value);
            }
        };
        give("name", self.what.volume_name().map(Value::from));
        if let JobKind::Send { from, .. } = &self.what {
            give("from", from.as_deref().map(Value::from));
        }
        give("rate_bytes", self.rate_bytes.map(Value::from));
        give("unheard_max_ms", self.unheard_max.map(|span| (span.ns / 1_000_000).into()));
        (method.to_owned(), given)
    }

    /// Executes the job. `watch` receives the progress and returns false to stop it.
    ///
    /// # Errors
    ///
    /// Why it failed, or that it was stopped.
    pub fn execute_job(
        &self,
        open: &Arc<OpenPool>,
        kinds: DeviceKinds,
        way: JobStream<'_>,
        watch: &mut dyn FnMut((u64, u64)) -> bool,
    ) -> Result<Value, Error> {
        let (opener, rate) = (open.opener_with_regions(kinds), self.rate_bytes);
        match &self.what {
            JobKind::Send { name, from } => match way {
                JobStream::Out(out) => open
                    .send_stream(&opener, from.as_deref(), name, out, watch)
                    .map(|sent| transfer_json(&sent)),
                _ => Err(missing_stream_error(open, "send")),
            },
            JobKind::Receive(name) => match way {
                JobStream::In(input) => {
                    open.receive_stream(name, input, watch).map(|came| transfer_json(&came))
                }
                _ => Err(missing_stream_error(open, "receive")),
            },
            JobKind::Check => open.check(&opener, watch).map(|seen| check_json(&seen)),
            JobKind::Scrub => Ok(scrub_json(open, &open.scrub(rate, watch)?)),
            JobKind::Inflate(name) => {
                let InflateResult { info, was_there } = open.inflate(&opener, name, rate, watch)?;
                let whole = format_bytes(info.blocks * u64::from(PAGE_BYTES));
                let already = if was_there { " already" } else { "" };
                let text = format!(
                    "volume `{name}` is thick{already}, with space for all of its {whole}\n"
                );
                Ok(CommandResult::new(open, !was_there, text, Some(name))?.as_json())
            }
            JobKind::Decouple(name) => {
                let change = tenmil_drivers::pool::VolumeOp::Decouple { name: name.clone() };
                if let Some(already) = super::idempotency::message_if_already_done(open, &change)? {
                    return Ok(CommandResult::new(open, false, already, Some(name))?.as_json());
                }
                let DecoupleResult { blocks, .. } = open.decouple(&opener, name, rate, watch)?;
                let text = match blocks {
                    0 => {
                        format!("volume `{name}` is on its own; it holds and shares what it did\n")
                    }
                    _ => format!("volume `{name}` is on its own; it has what its parent had\n"),
                };
                Ok(CommandResult::new(open, true, text, Some(name))?.as_json())
            }
        }
    }
}

/// Error for a missing stream.
fn missing_stream_error(open: &OpenPool, what: &str) -> Error {
    let text = format!("{}: {what}: found no stream, expected one", open.device_uri());
    Error::new(ErrorCategory::Usage, text)
}

fn job_state(end: Option<&JobResult>) -> &'static str {
    end.map_or("running", |ended| ended.state)
}

impl Jobs {
    pub(super) fn new(announcer: EventSender) -> Self {
        Self { announcer, clock: Clock::start(), table: Mutex::default() }
    }

    /// Starts a job on a thread of its own. Returns its row.
    pub(super) fn start_job(
        self: &Arc<Self>,
        open: &Arc<OpenPool>,
        kinds: DeviceKinds,
        long: JobSpec,
        stream: Option<LocalConnection>,
    ) -> Result<Value, RpcError> {
        let mut table = self.lock();
        let running = table.jobs.iter().filter(|job| job.end.get().is_none()).count();
        let what = long.what.name();
        if table.is_over || running >= RUNNING_MAX {
            let text =
                format!("{what}: {running} jobs are running, expected fewer than {RUNNING_MAX}");
            let hint = "wait for one to end, or stop one: see `tenmil get jobs`";
            return Err(RpcError::environment(ErrorCode::Busy, text).with_hint(hint));
        }
        let now = self.clock.now().ns;
        let job = Arc::new(Job {
            id: table.next_id + 1,
            store: open.device_uri().to_owned(),
            long,
            clock: self.clock,
            began_ns: now,
            queried_ns: AtomicU64::new(now),
            done_bytes: Counter::default(),
            size_bytes: Counter::default(),
            is_stopped: AtomicBool::new(false),
            end: OnceLock::new(),
        });
        let (jobs, theirs, open) = (Arc::clone(self), Arc::clone(&job), Arc::clone(open));
        let body = move |stop: &StopFlag| {
            let outcome = theirs.run_job(&open, kinds, stream.as_ref(), stop);
            // Close the stream before the end is reported.
            drop((open, stream));
            jobs.record_result(&theirs, outcome);
        };
        let hand = NamedThread::spawn("job", None, body).map_err(|error| {
            RpcError::environment(ErrorCode::Failed, format!("{what}: start a thread: {error}"))
        })?;
        table.next_id += 1;
        table.threads.retain(|hand| !hand.is_finished());
        table.threads.push(hand);
        table.jobs.push(Arc::clone(&job));
        if table.jobs.len() > JOBS_MAX
            && let Some(oldest) = table.jobs.iter().position(|job| job.end.get().is_some())
        {
            table.jobs.remove(oldest);
        }
        Ok(job.job_row())
    }

    fn record_result(&self, job: &Job, outcome: Result<Value, RpcError>) {
        let state = match &outcome {
            Ok(_) => "done",
            Err(_) if job.is_stopped.load(Ordering::Relaxed) => "stopped",
            Err(_) => "refused",
        };
        let _ = job.end.set(JobResult { state, outcome });
        let (id, what) = (job.id, job.long.what.name());
        let text = format!("job {id}, {what} of {}: {state}", job.store);
        let about = json!({ "id": id, "what": what, "pool": job.store, "state": state });
        self.announcer.emit(Event { kind: ENDED, text, about });
    }

    /// Rows of all jobs, or of one. A query for a single job counts as a sign that its result is
    /// still wanted.
    pub(super) fn job_rows(&self, id: Option<u64>) -> Value {
        let table = self.lock();
        let wanted = table.jobs.iter().filter(|job| id.is_none_or(|id| job.id == id));
        let now = self.clock.now().ns;
        let hear = |job: &&Arc<Job>| {
            if id.is_some() {
                job.queried_ns.store(now, Ordering::Relaxed);
            }
        };
        let row = |job: &Arc<Job>| {
            let mut row = job.job_row();
            // Results are large, so a list omits them.
            row["result"] = if id.is_some() { row["result"].take() } else { Value::Null };
            row
        };
        wanted.inspect(hear).map(row).collect()
    }

    /// Stops a job, if `is_meant`.
    pub(super) fn stop_job(&self, id: u64, is_meant: bool) -> Result<Value, RpcError> {
        let table = self.lock();
        let job = table.jobs.iter().find(|job| job.id == id).ok_or_else(|| {
            let text = format!("set job: none has the number {id}, expected one that is there");
            RpcError::usage(ErrorCode::NotFound, text).with_hint("see `tenmil get jobs`")
        })?;
        if is_meant {
            job.is_stopped.store(true, Ordering::Relaxed);
        }
        Ok(job.job_row())
    }

    /// Stops all jobs and waits a short time for their threads.
    pub(super) fn stop_all(&self) {
        let mut table = self.lock();
        table.is_over = true;
        let threads = std::mem::take(&mut table.threads);
        drop(table);
        worker_pool::stop_and_join_threads(threads);
    }

    fn lock(&self) -> MutexGuard<'_, JobTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    fn run_job(
        &self,
        open: &Arc<OpenPool>,
        kinds: DeviceKinds,
        stream: Option<&LocalConnection>,
        stop: &StopFlag,
    ) -> Result<Value, RpcError> {
        let continues = || self.poll_continue(stop);
        let mut conduit = stream.map(|stream| StreamFd::new(stream, &continues));
        let way = match (&mut conduit, &self.long.what) {
            (None, _) => JobStream::Nothing,
            (Some(conduit), JobKind::Receive(_)) => JobStream::In(conduit),
            (Some(conduit), _) => JobStream::Out(conduit),
        };
        let done = self.long.execute_job(open, kinds, way, &mut |(done, size)| {
            self.done_bytes.set(done);
            self.size_bytes.set(size);
            continues()
        });
        done.map_err(|error| rpc_error_of(&error))
    }

    /// Whether the job shall continue.
    fn poll_continue(&self, stop: &StopFlag) -> bool {
        if stop.is_stopped() || self.has_query_timed_out() {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
        !self.is_stopped.load(Ordering::Relaxed)
    }

    /// Whether no client has queried the job for too long.
    fn has_query_timed_out(&self) -> bool {
        let heard = tenmil_base::Instant { ns: self.queried_ns.load(Ordering::Relaxed) };
        let silence = self.clock.now().since(heard);
        self.long.unheard_max.is_some_and(|most| silence > most)
    }

    fn job_row(&self) -> Value {
        // Read once: the job may end while the row is built.
        let end = self.end.get();
        let outcome = end.map(|ended| ended.outcome.as_ref());
        json!({
            "id": self.id,
            "what": self.long.what.name(),
            "pool": self.store,
            "volume": self.long.what.volume_name(),
            "state": job_state(end),
            "done_bytes": self.done_bytes.get(),
            "size_bytes": self.size_bytes.get(),
            "rate_bytes": self.long.rate_bytes,
            "age_ns": self.clock.now().ns.saturating_sub(self.began_ns),
            "result": outcome.and_then(Result::ok),
            "refusal": outcome.and_then(Result::err).map(RpcError::to_json),
        })
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.lock();
        out.debug_list()
            .entries(table.jobs.iter().map(|job| (job.id, job_state(job.end.get()))))
            .finish()
    }
}
