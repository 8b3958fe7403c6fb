//! What is ordered of stores of volumes that a process has open.
//!
//! ```text
//!   the program that has the store open:   carry_out(order)           on its own thread
//!   anybody else:     set_volume_…  ->  a worker: carry_out(order)  ->  the answer, later
//!                     set_store_scrub -> a job, on a thread of its own; asked about by `jobs`
//! ```
//!
//! The words, the refusals and what is told are the same in both cases, for it is the same function that
//! does the work. The thread that serves the socket does none of it: an order waits for metadata to
//! survive a loss of power, and a device may take its time. [`Orders`] is what a process keeps for that;
//! it ends with the socket, and what goes on then is stopped.

mod already;
mod carry_out;
mod conduit;
mod difference;
mod jobs;
mod order;
mod similar;
mod tell;
mod workers;

use std::sync::Arc;

use block::MediumError;
use block::store::{OpenStore, all_open};
use host::local_socket::Connection;
use serde_json::{Map, Value};

use crate::event::Announcer;
use crate::later::Promise;
use crate::method::Call;
use crate::refusal::{Code, Refusal, either, quoted};

pub use carry_out::carry_out;
pub use difference::{DIFFERENCE, Portion, kind as kind_of_range};
pub(crate) use jobs::EVENTS;
pub use jobs::{JOB, Long, Way, What};
pub use order::Order;
pub(crate) use order::{STORE as WHICH_STORE, flag, named, percent, size as bytes};
pub use tell::{
    LISTED, STORE, TOLD, Told, VOLUME, carried, checked, device, devices_text, grown_text,
    percents, scrubbed, size, store, volumes,
};

use self::jobs::Jobs;
use self::workers::Workers;

/// The kinds of devices that the block layer does not know by itself.
pub type Kinds = &'static [(&'static str, &'static dyn block::Kind)];

/// What a process keeps to carry out what is ordered of the stores that it has open.
pub struct Orders {
    kinds: Kinds,
    announcer: Announcer,
    workers: Arc<Workers>,
    jobs: Arc<Jobs>,
}

impl Orders {
    /// For a process that opens devices of these kinds, and tells what happens by `announcer`.
    pub fn new(kinds: Kinds, announcer: Announcer) -> Self {
        let jobs = Arc::new(Jobs::new(announcer.clone()));
        Self { kinds, announcer, workers: Arc::default(), jobs }
    }

    /// Has a worker make the answer to a call.
    fn answer_later(
        &self,
        call: &Call<'_>,
        answer: impl FnOnce() -> Result<Value, Refusal> + Send + 'static,
    ) -> Result<Value, Refusal> {
        let (promise, pending) = Promise::new(self.announcer.clone());
        self.workers.hire(Box::new(move || promise.keep(answer())))?;
        call.later.leave(pending);
        Ok(Value::Null)
    }
}

impl Drop for Orders {
    fn drop(&mut self) {
        self.workers.end();
        self.jobs.end();
    }
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Orders").field("jobs", &self.jobs).finish_non_exhaustive()
    }
}

/// Tells of all stores that are open.
pub(crate) fn all_stores(call: &Call<'_>) -> Result<Value, Refusal> {
    let orders = orders(call)?;
    orders.answer_later(call, || all_open().iter().map(|open| told(store(open))).collect())
}

/// Tells of the volumes of a store.
pub(crate) fn all_volumes(call: &Call<'_>) -> Result<Value, Refusal> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    orders.answer_later(call, move || told(volumes(&find(wanted.as_deref())?)))
}

/// Tells what differs between two volumes, a portion of it.
pub(crate) fn differ(call: &Call<'_>) -> Result<Value, Refusal> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let text = |name| call.arguments.text(name).unwrap_or_default().to_owned();
    let (from, to) = (text("from"), text("to"));
    let at_bytes = call.arguments.whole("at_bytes").unwrap_or_default();
    orders.answer_later(call, move || {
        let open = find(wanted.as_deref())?;
        told(Portion::of(&open, (&from, &to), at_bytes)).map(|portion| portion.as_json())
    })
}

/// Carries out the order that is given by a method.
pub(crate) fn give(call: &Call<'_>, method: &str) -> Result<Value, Refusal> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let order = Order::read(method, call.arguments);
    let order =
        order.map_err(|why| Refusal::caller(Code::BadValue, format!("set {method}: {why}")))?;
    let kinds = orders.kinds;
    orders.answer_later(call, move || {
        let open = find(wanted.as_deref())?;
        told(carry_out(&open, kinds, &order)).map(|told| told.as_json())
    })
}

/// Begins something long, and answers with its row.
pub(crate) fn begin(call: &Call<'_>, long: Long) -> Result<Value, Refusal> {
    let (orders, wanted) = (orders(call)?, wanted(call));
    let stream = if long.what.has_stream() { Some(stream(call, &long)?) } else { None };
    let (kinds, jobs) = (orders.kinds, Arc::clone(&orders.jobs));
    orders.answer_later(call, move || {
        let open = find(wanted.as_deref())?;
        jobs.begin(&open, kinds, long, stream)
    })
}

/// The end of a stream that came beside a request.
fn stream(call: &Call<'_>, long: &Long) -> Result<Connection, Refusal> {
    let (method, _) = long.request("");
    let given = call.passed.take().ok_or_else(|| {
        std::io::Error::other("found no descriptor beside it, expected one end of a Unix stream")
    });
    given.and_then(Connection::given).map_err(|error| {
        let hint = "use `tenmil volume send` and `tenmil volume receive`, which bring one";
        Refusal::caller(Code::BadValue, format!("{method}: {error}")).with_hint(hint)
    })
}

/// Tells of what is long: of all, or of one.
pub(crate) fn all_jobs(call: &Call<'_>) -> Result<Value, Refusal> {
    Ok(orders(call)?.jobs.rows(call.arguments.whole("id")))
}

/// Stops one, and answers with its row.
pub(crate) fn stop_job(call: &Call<'_>) -> Result<Value, Refusal> {
    let id = call.arguments.whole("id").unwrap_or_default();
    orders(call)?.jobs.stop(id, call.arguments.flag("stop") == Some(true))
}

fn orders<'a>(call: &Call<'a>) -> Result<&'a Orders, Refusal> {
    call.state.part::<Orders>("stores of volumes")
}

fn wanted(call: &Call<'_>) -> Option<String> {
    call.arguments.text("store").map(str::to_owned)
}

/// The store that is meant: the only one that is open, or the one whose device, name or UUID it is.
fn find(wanted: Option<&str>) -> Result<Arc<OpenStore>, Refusal> {
    let all = all_open();
    let is_it = |open: &&Arc<OpenStore>| {
        let is_named = |wanted| open.device() == wanted || open.name() == wanted;
        wanted.is_none_or(|wanted| is_named(wanted) || format!("{:032x}", open.uuid()) == wanted)
    };
    let mut found = all.iter().filter(is_it);
    if let (Some(open), None) = (found.next(), found.next()) {
        return Ok(Arc::clone(open));
    }
    let names: Vec<&str> = all.iter().map(|open| open.device()).collect();
    let expected = if names.is_empty() { "one that is open".to_owned() } else { either(&names) };
    let found = wanted.map_or_else(|| "no name".into(), quoted);
    let message = format!("store: {found}, expected {expected}");
    Err(Refusal::caller(Code::Absent, message).with_hint("see `tenmil get stores`"))
}

/// A refusal of the store's as one of ours.
fn told<T>(done: Result<T, MediumError>) -> Result<T, Refusal> {
    done.map_err(|error| refusal(&error))
}

pub(crate) fn refusal(error: &MediumError) -> Refusal {
    Refusal {
        code: Code::NotDone,
        blame: error.blame(),
        message: error.to_string(),
        hint: error.hint().map(str::to_owned),
    }
}

/// A call of a method as it goes over the wire: its name there, and what is given to it.
pub fn request(device: &str, order: &Order) -> (String, Map<String, Value>) {
    let mut parameters = order.parameters();
    parameters.insert("store".into(), device.into());
    (format!("set_{}", order.method()), parameters)
}

#[cfg(test)]
mod tests;
