//! A store of volumes at hand: open in this process, or in another one of the same user that has it open
//! and does what it is told.
//!
//! Who has it open is found out at the control sockets, by what the kernel calls the files and devices
//! that the store is on; how anybody spells them does not matter. All are asked before the device is
//! opened here: one that is reached over a network would not say that somebody else has it.

mod carry;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{Blame, Span};
use block::store::{Changed, OpenStore, Place, file_holder, identity};
use block::{MediumError, Opener};
use control::orders::{self, Long, Order, Portion, Told, Way};
use control::{Client, Code, Refusal};
use host::process::command_line;
use serde_json::{Map, Value, json};

use super::running::{directory, refused};
use super::volume::stream::Progress;
use crate::Refused;

/// A store at hand.
pub(super) enum Hand<'a> {
    /// It is open here.
    Here {
        /// The store.
        open: Arc<OpenStore>,
        /// What its devices were opened with.
        opener: &'a Opener<'a>,
    },
    /// Another process has it open.
    There(There<'a>),
}

/// A store that another process has open.
pub(super) struct There<'a> {
    pid: u32,
    client: Client,
    /// The device that it is on, as that process calls it.
    device: String,
    opener: &'a Opener<'a>,
}

/// How long a process may take to say which stores it has open.
const LOOK_MAX: Span = Span::from_secs(2);
/// How long one may take for an order: longer than it lets its devices take.
const ORDER_MAX: Span = Span::from_secs(150);
/// How often it is asked how far something long is, and how long it goes on if nobody asks any more.
const LOOK_INTERVAL: Span = Span::from_ms(100);
const UNHEARD_MAX: Span = Span::from_secs(5);

impl<'a> Hand<'a> {
    /// The store at a place.
    ///
    /// # Errors
    ///
    /// If nobody has it open and it cannot be opened here, or whoever has it open cannot be told.
    pub(super) fn on(opener: &'a Opener<'a>, place: &Place) -> Result<Self, Refused> {
        let mut silent = Vec::new();
        match look_for(opener, place, &mut silent) {
            Some(there) => Ok(Self::There(there)),
            None => {
                let open = OpenStore::open(opener, place);
                let open = open.map_err(|error| explained(&error, place, &silent))?;
                // It may be open in a process that calls the device otherwise: the store itself says so.
                match open.owner_here().and_then(|pid| owned_by(opener, pid, open.uuid())) {
                    Some(there) => Ok(Self::There(there)),
                    None => Ok(Self::Here { open, opener }),
                }
            }
        }
    }

    /// What comes of something that is done with a device that nobody has open; or the process that has
    /// its store.
    ///
    /// # Errors
    ///
    /// If it cannot be done here, or whoever has the device cannot be told.
    pub(super) fn elsewhere_or<T>(
        opener: &'a Opener<'a>,
        place: &Place,
        here: impl FnOnce(&Opener<'_>, &Place) -> Result<T, MediumError>,
    ) -> Result<Result<T, Self>, Refused> {
        let mut silent = Vec::new();
        if let Some(there) = look_for(opener, place, &mut silent) {
            return Ok(Err(Self::There(there)));
        }
        let done = here(opener, place);
        done.map(Ok).map_err(|error| explained(&error, place, &silent))
    }

    /// The process that has it open, if that is another one.
    pub(super) fn pid(&self) -> Option<u32> {
        match self {
            Self::Here { .. } => None,
            Self::There(there) => Some(there.pid),
        }
    }

    /// A line about that process.
    pub(super) fn by(&self) -> String {
        match self {
            Self::Here { .. } => String::new(),
            Self::There(there) => format!("by {}, which has the store open\n", process(there.pid)),
        }
    }

    /// Where it is open, in the middle of a sentence.
    pub(super) fn by_whom(&self) -> String {
        let pid = self.pid().unwrap_or_else(std::process::id);
        format!("in {}", process(pid))
    }

    /// What devices are opened with here.
    const fn opener(&self) -> &'a Opener<'a> {
        match self {
            Self::Here { opener, .. } | Self::There(There { opener, .. }) => opener,
        }
    }

    /// Has an order carried out.
    pub(super) fn order(&mut self, order: &Order) -> Result<Told, Refused> {
        match self {
            Self::Here { open, .. } => Ok(orders::carry_out(open, crate::KINDS, order)?),
            Self::There(there) => there.order(order),
        }
    }

    /// What is told of the store.
    pub(super) fn store(&mut self) -> Result<Value, Refused> {
        match self {
            Self::Here { open, .. } => Ok(orders::store(open)?),
            Self::There(there) => {
                let found = there.call("stores", Map::new())?;
                let is_it = |store: &&Value| store["uri"] == there.device.as_str();
                let store = found.as_array().and_then(|stores| stores.iter().find(is_it));
                store.cloned().ok_or_else(|| there.refuse("it has closed the store meanwhile"))
            }
        }
    }

    /// What is told of its volumes.
    pub(super) fn volumes(&mut self) -> Result<Value, Refused> {
        match self {
            Self::Here { open, .. } => Ok(orders::volumes(open)?),
            Self::There(there) => {
                let given = there.given();
                there.call("volumes", given)
            }
        }
    }

    /// What the second of two volumes has that the first has not.
    pub(super) fn differences(&mut self, from: &str, to: &str) -> Result<Vec<Changed>, Refused> {
        match self {
            Self::Here { open, .. } => {
                let (from, to, mut changed) = (open.find(from)?, open.find(to)?, Vec::new());
                open.differences(Some(&from), &to, &mut |range| {
                    changed.push(range);
                    Ok(())
                })?;
                Ok(changed)
            }
            Self::There(there) => there.differences(from, to),
        }
    }

    /// Has something long be done. `None` if it was stopped by whoever sits here.
    pub(super) fn long(
        &mut self,
        long: &Long,
        phase: &'static str,
    ) -> Result<Option<Value>, Refused> {
        let mut progress = Progress::new(self.opener(), phase);
        let done = match self {
            Self::Here { open, .. } => {
                let done = long
                    .carry_out(open, crate::KINDS, Way::Nothing, &mut |done| progress.turn(done));
                done.map(Some).map_err(Refused::from)
            }
            Self::There(there) => there.long(long, &mut |done| {
                progress.turn(done);
            }),
        };
        progress.end();
        done
    }
}

impl There<'_> {
    fn order(&mut self, order: &Order) -> Result<Told, Refused> {
        let (method, given) = orders::request(&self.device, &order.clone().from_root());
        let answer = self.call(&method, given)?;
        Told::from_json(&answer).ok_or_else(|| self.refuse("found an answer of another kind"))
    }

    fn call(&mut self, method: &str, given: Map<String, Value>) -> Result<Value, Refused> {
        self.call_with(method, given, &[])
    }

    fn call_with(
        &mut self,
        method: &str,
        given: Map<String, Value>,
        files: &[BorrowedFd<'_>],
    ) -> Result<Value, Refused> {
        let answer = self.client.call_with(method, given, files, ORDER_MAX);
        answer.map_err(|refusal| match refusal.code {
            Code::TooSlow | Code::Gone => self.refuse(&refusal.message),
            _ => refused(refusal),
        })
    }

    /// Asks for what differs, a portion at a time.
    fn differences(&mut self, from: &str, to: &str) -> Result<Vec<Changed>, Refused> {
        let (mut changed, mut next, mut uuids) = (Vec::new(), Some(0), None);
        while let Some(at_bytes) = next {
            let mut given = self.given();
            let more = [("from", from.into()), ("to", to.into()), ("at_bytes", at_bytes.into())];
            given.extend(more.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
            let answer = self.call("volume_diff", given)?;
            let portion = Portion::from_json(&answer);
            let portion = portion.ok_or_else(|| self.refuse("found an answer of another kind"))?;
            if *uuids.get_or_insert_with(|| portion.uuids.clone()) != portion.uuids {
                let text = format!("`{from}` or `{to}` has become another volume meanwhile");
                return Err(self.refuse(&text));
            }
            changed.extend(portion.changed);
            next = portion.next_bytes;
        }
        Ok(changed)
    }

    fn given(&self) -> Map<String, Value> {
        Map::from_iter([("store".to_owned(), Value::from(self.device.as_str()))])
    }

    /// Begins something long there, and looks how far it is until it has ended.
    fn long(
        &mut self,
        long: &Long,
        look: &mut dyn FnMut((u64, u64)),
    ) -> Result<Option<Value>, Refused> {
        host::signal::catch_interrupts()
            .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
        let job = self.begin(long, &[])?;
        self.see_it_through(job, look)
    }

    /// Begins something long, with a descriptor for its bytes, or none. Returns its row.
    fn begin(&mut self, long: &Long, files: &[BorrowedFd<'_>]) -> Result<Value, Refused> {
        let long = Long { unheard_max: Some(UNHEARD_MAX), ..long.clone() };
        let (method, given) = long.request(&self.device);
        self.call_with(&method, given, files)
    }

    /// Looks how far a job is until it has ended. `None` if it was stopped by whoever sits here.
    fn see_it_through(
        &mut self,
        mut job: Value,
        look: &mut dyn FnMut((u64, u64)),
    ) -> Result<Option<Value>, Refused> {
        let id = job["id"].clone();
        let mut is_stopped = false;
        loop {
            let bytes = |name: &str| job[name].as_u64().unwrap_or_default();
            look((bytes("done_bytes"), bytes("size_bytes")));
            match job["state"].as_str() {
                Some("running") => host::thread::rest(LOOK_INTERVAL),
                Some("done") => return Ok(Some(job["result"].take())),
                Some("stopped") if is_stopped => {
                    tracing::info!("job {id} of process {} is stopped", self.pid);
                    return Ok(None);
                }
                _ => {
                    let refusal = Refusal::from_json(&job["refusal"]).map(refused);
                    return Err(refusal.unwrap_or_else(|| self.refuse("it forgot about the job")));
                }
            }
            if host::signal::interrupted() && !is_stopped {
                is_stopped = true;
                let given = json!({ "id": id, "stop": true });
                job = self.call("set_job", given.as_object().cloned().unwrap_or_default())?;
                continue;
            }
            let mut rows = self.call("jobs", Map::from_iter([("id".to_owned(), id.clone())]))?;
            job = rows.get_mut(0).map(Value::take).unwrap_or_default();
        }
    }

    /// It has not done as it is asked, and has not said why.
    fn refuse(&self, why: &str) -> Refused {
        let text = format!("{}, which has {} open: {why}", process(self.pid), self.device);
        Refused::peer(text).with_hint(
            "It may be done or not; say the same again, and what is done already is said to be.",
        )
    }
}

/// `process 4711 (tenmil serve file:/disk)`.
fn process(pid: u32) -> String {
    match command_line(pid) {
        Some(words) => {
            let words = words.join(" ");
            let shown: String = words.chars().filter(|c| !base::text::acts(*c)).take(80).collect();
            format!("process {pid} ({shown})")
        }
        None => format!("process {pid}"),
    }
}

/// The process that has a store open, if there is one that says so. Those that say nothing are noted,
/// with what came instead.
fn look_for<'a>(
    opener: &'a Opener<'a>,
    place: &Place,
    silent: &mut Vec<(u32, Refusal)>,
) -> Option<There<'a>> {
    // Without a directory nobody listens there.
    let directory = directory().ok()?;
    let wanted = identity(&place.store);
    for pid in directory.listening().ok()? {
        if pid == std::process::id() {
            continue;
        }
        let asked = Client::connect(&directory.socket_of(pid), LOOK_MAX).and_then(|mut client| {
            let stores = client.call("stores", Map::new(), LOOK_MAX)?;
            Ok((client, stores))
        });
        let (client, stores) = match asked {
            Ok(asked) => asked,
            Err(refusal) => {
                silent.push((pid, refusal));
                continue;
            }
        };
        let is_it = |store: &&Value| store["identity"] == wanted.as_str();
        let found = stores.as_array().and_then(|stores| stores.iter().find(is_it));
        if let Some(device) = found.and_then(|store| store["uri"].as_str()) {
            return Some(There { pid, client, device: device.to_owned(), opener });
        }
    }
    None
}

/// The store in the process that owns it, as that process says.
fn owned_by<'a>(opener: &'a Opener<'a>, pid: u32, uuid: u128) -> Option<There<'a>> {
    let directory = directory().ok()?;
    let mut client = Client::connect(&directory.socket_of(pid), LOOK_MAX).ok()?;
    let stores = client.call("stores", Map::new(), LOOK_MAX).ok()?;
    let uuid = format!("{uuid:032x}");
    let found = stores.as_array()?.iter().find(|store| store["uuid"] == uuid.as_str())?;
    let device = found["uri"].as_str()?.to_owned();
    Some(There { pid, client, device, opener })
}

/// Why a store cannot be opened: if that is because somebody has its device, who he is, what he said when
/// he was asked, and what to do about it.
fn explained(error: &MediumError, place: &Place, silent: &[(u32, Refusal)]) -> Refused {
    let refused = Refused::from(error.clone());
    let is_hinted = refused.hint.is_some();
    let Some((pid, _)) = file_holder(&place.store).filter(|(pid, _)| *pid != std::process::id())
    else {
        return refused;
    };
    if !refused.text.contains(&format!("process {pid}")) || is_hinted {
        return refused;
    }
    match silent.iter().find(|(asked, _)| *asked == pid) {
        Some((_, refusal)) => {
            let text = format!("{}; it was asked for the store, and: {refusal}", refused.text);
            let hint = format!(
                "See what it does with `tenmil get process --pid {pid}`, or end it: `kill {pid}`."
            );
            Refused { text, blame: Blame::Peer, hint: None }.with_hint(hint)
        }
        None => refused.with_hint(format!(
            "Process {pid} has it open, but not this store as one that can be told: end it, or what it \
             does with the device, and say the same again."
        )),
    }
}
