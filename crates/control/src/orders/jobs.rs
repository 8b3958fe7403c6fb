//! What takes long: jobs, each on a thread of its own, that tell how far they are and can be stopped.

use std::fmt;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use base::{Blame, Count, Span};
use block::MediumError;
use block::store::{Decoupled, Inflated, OpenStore, PAGE_BYTES};
use host::local_socket::Connection;
use host::{Clock, Stop, Thread};
use serde_json::{Map, Value, json};

use super::conduit::Conduit;
use super::{Kinds, Told, carried, checked, refusal, scrubbed, size, workers};
use crate::event::{Announcer, Event, EventKind};
use crate::refusal::{Code, Refusal};
use crate::shape::{Field, Shape};

/// What takes long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Long {
    /// What is done.
    pub what: What,
    /// At most so many bytes in a second.
    pub rate_bytes: Option<u64>,
    /// It is stopped when nobody has asked about it for so long.
    pub unheard_max: Option<Span>,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// All data of a store are read and compared with their checksums.
    Scrub,
    /// All metadata of a store are read and compared with each other.
    Check,
    /// The volume of this name is made thick.
    Inflate(String),
    /// The volume of this name is to need no parent.
    Decouple(String),
    /// A snapshot goes out as a stream.
    Send {
        /// Its name.
        name: String,
        /// The snapshot from which it differs, if not all of it is to go.
        from: Option<String>,
    },
    /// A snapshot of this name is made of a stream that comes in.
    Receive(String),
}

/// What the bytes of a job go through that has some.
pub enum Way<'a> {
    /// It has none.
    Nothing,
    /// They are written there.
    Out(&'a mut dyn Write),
    /// They come from there.
    In(&'a mut dyn Read),
}

/// What is told of a job.
pub const JOB: &[Field] = &[
    Field::new("id", Shape::Whole, "its number, which is never used again"),
    Field::new("what", Shape::Text, "scrub, check, inflate, decouple, send or receive"),
    Field::new("store", Shape::Text, "the device with the store that it is about"),
    Field::new("volume", Shape::Maybe(&Shape::Text), "the volume that it is about"),
    Field::new("state", Shape::Text, "running, done, refused or stopped"),
    Field::new("done_bytes", Shape::Whole, "how far it is"),
    Field::new("size_bytes", Shape::Whole, "of how much; zero until that is known"),
    Field::new("rate_bytes", Shape::Maybe(&Shape::Whole), "bytes in a second at most"),
    Field::new("age_ns", Shape::Whole, "how long ago it was begun"),
    Field::new("result", Shape::Maybe(&Shape::Object), "what came of it, if asked by its number"),
    Field::new(
        "refusal",
        Shape::Maybe(&Shape::Object),
        "why it was not done: code, blame, message, hint",
    ),
];

const ENDED: EventKind =
    EventKind { name: "job-ended", help: "a job of a store has been done, refused or stopped" };

pub(crate) const EVENTS: &[EventKind] = &[ENDED];

/// All jobs of a process.
pub(super) struct Jobs {
    announcer: Announcer,
    clock: Clock,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// The oldest first.
    jobs: Vec<Arc<Job>>,
    hands: Vec<Thread<()>>,
    next_id: u64,
    is_over: bool,
}

struct Job {
    id: u64,
    store: String,
    long: Long,
    clock: Clock,
    began_ns: u64,
    /// When somebody last asked about it.
    heard_ns: AtomicU64,
    done_bytes: Count,
    size_bytes: Count,
    is_stopped: AtomicBool,
    end: OnceLock<Ended>,
}

/// What came of a job. It is told whole or not at all.
struct Ended {
    state: &'static str,
    outcome: Result<Value, Refusal>,
}

/// Jobs that are done at once.
const RUNNING_MAX: usize = 4;
/// Jobs that are remembered, with those.
const KEPT_MAX: usize = 16;

impl What {
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

    /// Whether bytes of a volume go out or come in.
    pub(super) const fn has_stream(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Receive(_))
    }

    fn volume(&self) -> Option<&str> {
        match self {
            Self::Scrub | Self::Check => None,
            Self::Inflate(name)
            | Self::Decouple(name)
            | Self::Send { name, .. }
            | Self::Receive(name) => Some(name),
        }
    }
}

impl Long {
    /// The call that begins it for a store on this device, as it goes over the wire.
    pub fn request(&self, device: &str) -> (String, Map<String, Value>) {
        let method = match self.what {
            What::Scrub => "set_store_scrub",
            What::Check => "set_store_check",
            What::Inflate(_) => "set_volume_inflate",
            What::Decouple(_) => "set_volume_decouple",
            What::Send { .. } => "set_volume_send",
            What::Receive(_) => "set_volume_receive",
        };
        let mut given = Map::new();
        given.insert("store".into(), device.into());
        let mut give = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                given.insert(name.into(), value);
            }
        };
        give("name", self.what.volume().map(Value::from));
        if let What::Send { from, .. } = &self.what {
            give("from", from.as_deref().map(Value::from));
        }
        give("rate_bytes", self.rate_bytes.map(Value::from));
        give("unheard_max_ms", self.unheard_max.map(|span| (span.ns / 1_000_000).into()));
        (method.to_owned(), given)
    }

    /// Does it.
    ///
    /// # Errors
    ///
    /// Why it was not done, or that `watch` said no.
    pub fn carry_out(
        &self,
        open: &Arc<OpenStore>,
        kinds: Kinds,
        way: Way<'_>,
        watch: &mut dyn FnMut((u64, u64)) -> bool,
    ) -> Result<Value, MediumError> {
        let (opener, rate) = (open.opener(kinds), self.rate_bytes);
        match &self.what {
            What::Send { name, from } => match way {
                Way::Out(out) => {
                    open.send(&opener, from.as_deref(), name, out, watch).map(|sent| carried(&sent))
                }
                _ => Err(no_way(open, "send")),
            },
            What::Receive(name) => match way {
                Way::In(input) => open.receive(name, input, watch).map(|came| carried(&came)),
                _ => Err(no_way(open, "receive")),
            },
            What::Check => open.check(&opener, watch).map(|seen| checked(&seen)),
            What::Scrub => Ok(scrubbed(open, &open.scrub(rate, watch)?)),
            What::Inflate(name) => {
                let Inflated { info, was_there } = open.inflate(&opener, name, rate, watch)?;
                let whole = size(info.blocks * u64::from(PAGE_BYTES));
                let already = if was_there { " already" } else { "" };
                let text = format!(
                    "volume `{name}` is thick{already}, and has room for all of its {whole}\n"
                );
                Ok(Told::new(open, !was_there, text, Some(name))?.as_json())
            }
            What::Decouple(name) => {
                let change = block::store::Change::Decouple { name: name.clone() };
                if let Some(already) = super::already::say(open, &change)? {
                    return Ok(Told::new(open, false, already, Some(name))?.as_json());
                }
                let Decoupled { blocks, .. } = open.decouple(&opener, name, rate, watch)?;
                let text = match blocks {
                    0 => {
                        format!("volume `{name}` is on its own; it holds and shares what it did\n")
                    }
                    _ => format!("volume `{name}` is on its own; it has what its parent had\n"),
                };
                Ok(Told::new(open, true, text, Some(name))?.as_json())
            }
        }
    }
}

/// A stream was forgotten.
fn no_way(open: &OpenStore, what: &str) -> MediumError {
    let text = format!("{}: {what}: found no stream, expected one", open.device());
    MediumError::new(Blame::Caller, text)
}

fn state(end: Option<&Ended>) -> &'static str {
    end.map_or("running", |ended| ended.state)
}

impl Jobs {
    pub(super) fn new(announcer: Announcer) -> Self {
        Self { announcer, clock: Clock::start(), table: Mutex::default() }
    }

    /// Begins one, on a thread of its own. Answers with its row.
    pub(super) fn begin(
        self: &Arc<Self>,
        open: &Arc<OpenStore>,
        kinds: Kinds,
        long: Long,
        stream: Option<Connection>,
    ) -> Result<Value, Refusal> {
        let mut table = self.lock();
        let running = table.jobs.iter().filter(|job| job.end.get().is_none()).count();
        let what = long.what.name();
        if table.is_over || running >= RUNNING_MAX {
            let text =
                format!("{what}: {running} jobs are under way, expected fewer than {RUNNING_MAX}");
            let hint = "wait for one to end, or stop one: see `tenmil get jobs`";
            return Err(Refusal::machine(Code::Busy, text).with_hint(hint));
        }
        let now = self.clock.now().ns;
        let job = Arc::new(Job {
            id: table.next_id + 1,
            store: open.device().to_owned(),
            long,
            clock: self.clock,
            began_ns: now,
            heard_ns: AtomicU64::new(now),
            done_bytes: Count::default(),
            size_bytes: Count::default(),
            is_stopped: AtomicBool::new(false),
            end: OnceLock::new(),
        });
        let (jobs, theirs, open) = (Arc::clone(self), Arc::clone(&job), Arc::clone(open));
        let body = move |stop: &Stop| {
            let outcome = theirs.run(&open, kinds, stream.as_ref(), stop);
            // Closed before anybody is told that it has ended.
            drop((open, stream));
            jobs.end_of(&theirs, outcome);
        };
        let hand = Thread::spawn("job", None, body).map_err(|error| {
            Refusal::machine(Code::NotDone, format!("{what}: start a thread: {error}"))
        })?;
        table.next_id += 1;
        table.hands.retain(|hand| !hand.is_finished());
        table.hands.push(hand);
        table.jobs.push(Arc::clone(&job));
        if table.jobs.len() > KEPT_MAX
            && let Some(oldest) = table.jobs.iter().position(|job| job.end.get().is_some())
        {
            table.jobs.remove(oldest);
        }
        Ok(job.row())
    }

    fn end_of(&self, job: &Job, outcome: Result<Value, Refusal>) {
        let state = match &outcome {
            Ok(_) => "done",
            Err(_) if job.is_stopped.load(Ordering::Relaxed) => "stopped",
            Err(_) => "refused",
        };
        let _ = job.end.set(Ended { state, outcome });
        let (id, what) = (job.id, job.long.what.name());
        let text = format!("job {id}, {what} of {}: {state}", job.store);
        let about = json!({ "id": id, "what": what, "store": job.store, "state": state });
        self.announcer.announce(Event { kind: ENDED, text, about });
    }

    /// What is told of all, or of the one with this number. Who asks for one has been heard.
    pub(super) fn rows(&self, id: Option<u64>) -> Value {
        let table = self.lock();
        let wanted = table.jobs.iter().filter(|job| id.is_none_or(|id| job.id == id));
        let now = self.clock.now().ns;
        let hear = |job: &&Arc<Job>| {
            if id.is_some() {
                job.heard_ns.store(now, Ordering::Relaxed);
            }
        };
        let row = |job: &Arc<Job>| {
            let mut row = job.row();
            // A list of all is to be looked at.
            row["result"] = if id.is_some() { row["result"].take() } else { Value::Null };
            row
        };
        wanted.inspect(hear).map(row).collect()
    }

    /// Stops one, if `is_meant`.
    pub(super) fn stop(&self, id: u64, is_meant: bool) -> Result<Value, Refusal> {
        let table = self.lock();
        let job = table.jobs.iter().find(|job| job.id == id).ok_or_else(|| {
            let text = format!("set job: none has the number {id}, expected one that is there");
            Refusal::caller(Code::Absent, text).with_hint("see `tenmil get jobs`")
        })?;
        if is_meant {
            job.is_stopped.store(true, Ordering::Relaxed);
        }
        Ok(job.row())
    }

    /// Stops all, and waits for their end, but not long.
    pub(super) fn end(&self) {
        let mut table = self.lock();
        table.is_over = true;
        let hands = std::mem::take(&mut table.hands);
        drop(table);
        workers::end(hands);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    fn run(
        &self,
        open: &Arc<OpenStore>,
        kinds: Kinds,
        stream: Option<&Connection>,
        stop: &Stop,
    ) -> Result<Value, Refusal> {
        let goes_on = || self.goes_on(stop);
        let mut conduit = stream.map(|stream| Conduit::new(stream, &goes_on));
        let way = match (&mut conduit, &self.long.what) {
            (None, _) => Way::Nothing,
            (Some(conduit), What::Receive(_)) => Way::In(conduit),
            (Some(conduit), _) => Way::Out(conduit),
        };
        let done = self.long.carry_out(open, kinds, way, &mut |(done, size)| {
            self.done_bytes.set(done);
            self.size_bytes.set(size);
            goes_on()
        });
        done.map_err(|error| refusal(&error))
    }

    /// Whether it is still wanted.
    fn goes_on(&self, stop: &Stop) -> bool {
        if stop.is_stopped() || self.is_unheard() {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
        !self.is_stopped.load(Ordering::Relaxed)
    }

    /// Whether whoever wanted it has gone.
    fn is_unheard(&self) -> bool {
        let heard = base::Instant { ns: self.heard_ns.load(Ordering::Relaxed) };
        let silence = self.clock.now().since(heard);
        self.long.unheard_max.is_some_and(|most| silence > most)
    }

    fn row(&self) -> Value {
        // Looked at once: it may end while its row is made.
        let end = self.end.get();
        let outcome = end.map(|ended| ended.outcome.as_ref());
        json!({
            "id": self.id,
            "what": self.long.what.name(),
            "store": self.store,
            "volume": self.long.what.volume(),
            "state": state(end),
            "done_bytes": self.done_bytes.get(),
            "size_bytes": self.size_bytes.get(),
            "rate_bytes": self.long.rate_bytes,
            "age_ns": self.clock.now().ns.saturating_sub(self.began_ns),
            "result": outcome.and_then(Result::ok),
            "refusal": outcome.and_then(Result::err).map(Refusal::to_json),
        })
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.lock();
        out.debug_list()
            .entries(table.jobs.iter().map(|job| (job.id, state(job.end.get()))))
            .finish()
    }
}
