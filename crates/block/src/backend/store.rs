//! Volumes of a store, as block devices.
//!
//! ```text
//!   volume:[file:/pool]/db ──┐
//!                            ├── one open store ── file:/pool
//!   volume:[file:/pool]/log ─┘
//! ```
//!
//! What a store does is decided in the crate `volume`, which does no I/O. Here are the threads: a
//! store is open once in a process, however many of its volumes are; every channel of a volume has a
//! way of its own to the device, over which its data go, and an [owner] moves what the store
//! needs for itself.

mod absent;
mod below;
mod bounce;
mod carrier;
mod channel;
mod check;
mod decouple;
mod extents;
mod ground;
mod grow;
mod identity;
mod inflate;
mod known;
mod left;
mod make;
mod once;
mod outside;
mod owner;
mod pace;
mod place;
mod raw;
mod readers;
mod receive;
mod rescue;
mod reserved;
mod room;
mod scrub;
mod send;
mod shared;
mod spans;
mod stops;
#[cfg(test)]
pub(crate) mod tests;
mod transfers;
mod users;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{
    Backend, Blame, Durability, Extent, Holds, Limits, Medium, Operation, Outcome, Span, Support,
};
use dma::Regions;
use host::{Clock, Sleeper, Thread};
use volume::{Action, Answer, Ask, End, Owner as Owning, StoreError, Usage, VolumeInfo};

pub use self::check::Checked;
pub use self::decouple::Decoupled;
pub use self::ground::DeviceInfo;
pub use self::grow::Grown;
pub use self::identity::{file_holder, identity};
pub use self::inflate::Inflated;
pub use self::make::{Created, check, create, create_over, grow, take_over};
pub use self::once::all_open;
pub use self::outside::CheckedParent;
pub use self::place::Place;
pub use self::receive::INCOMPLETE;
pub use self::rescue::{Saved, SavedVolume, rescue};
pub use self::room::{RoomNews, hear_of_room};
pub use self::scrub::{Bad, Cause, Scrubbed};
pub use self::send::{Carried, Changed, Watch};
pub use self::stops::{StopNews, hear_of_stops};
pub use volume::{Account, Change, Counted, Fill, Finding, Parent, Report, VolumeInfo as Info};

use self::channel::VolumeChannel;
use self::ground::Ground;
use self::outside::Outside;
use self::owner::Owner;
use self::reserved::Reserved;
use self::shared::{Desk, Note, Shared, State};
use crate::backend::exclusion::Preempts;
use crate::backend::owned;
use crate::open::{Opened, Opener};
use crate::uri::Uri;
use crate::{Existing, MediumError};

/// A store that this process has open. It is closed when the last one who holds it lets go, and what
/// was written to its volumes is made to survive then.
pub struct OpenStore {
    shared: Arc<Shared>,
    /// What it lies on. Whoever opens a way to it, or makes it grow, has the lock.
    ground: Mutex<Ground>,
    regions: Regions,
    clock: Clock,
    /// How pages lie on the blocks of the first device, in which all are counted.
    shape: Shape,
    name: String,
    /// Which device that is, however it was spelled.
    identity: String,
    owner: Option<Thread<()>>,
    /// What says on the device that this process has it.
    owns: owned::Opener,
    /// Whether the devices refuse the writes of other hosts.
    reserved: Arc<Reserved>,
}

/// One volume of a store.
struct Volume {
    open: Arc<OpenStore>,
    info: VolumeInfo,
    /// What it is read from where nothing is mapped, if that is anything and could be opened.
    parent: Option<Outside>,
    limits: Limits,
    /// How many blocks it has by now: all channels go by it.
    block_count: Arc<AtomicU64>,
    is_written: bool,
    /// Somebody outside has it, who expects it to stay what it is.
    is_used: bool,
}

/// How pages lie on the blocks of a device.
#[derive(Clone, Copy, Debug)]
struct Shape {
    block_size: u32,
    blocks_in_page: u64,
    /// Whole pages on the device.
    pages: u64,
    /// Pages that the device takes at once.
    request_pages: u32,
}

/// Moves what an action says: the checksums of its blocks, where they are wanted, or what went wrong.
type Carry<'a> = dyn FnMut(&Action) -> Result<Copied, Outcome> + 'a;

/// What is known of data that have been moved.
enum Copied {
    Data,
    /// The checksums of the blocks.
    Sums(Vec<u32>),
    /// Whether each block holds anything but zeroes.
    Contents(Vec<bool>),
}

/// Bytes in a block of a store, and of its volumes.
pub const PAGE_BYTES: u32 = 4096;
/// Bytes of metadata in memory, unless the name says otherwise.
pub const CACHE_DEFAULT: u64 = 32 << 20;
const DEPTH_MAX: u32 = 256;
/// What a volume does only if its device does.
const READING: [Operation; 4] =
    [Operation::Read, Operation::Flush, Operation::Compare, Operation::Verify];
/// Pages in the largest request.
const REQUEST_PAGES_MAX: u32 = 256;
/// How long the last flush may take when a store is closed.
const CLOSING_MAX: Span = Span::from_secs(30);
/// How long a question may take that is not on the way of an I/O.
const PATIENCE: Span = Span::from_secs(120);

/// Opens `volume:[URI]/name?cache=32m`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let place = Place::of(uri)?;
    let name = place.volume(uri)?;
    open_volume(opener, &once::open(opener, &place)?, uri, name)
}

/// Opens a volume of an open store.
fn open_volume(
    opener: &Opener<'_>,
    open: &Arc<OpenStore>,
    uri: &Uri,
    name: &str,
) -> Result<Opened, MediumError> {
    let info = open.find(name)?;
    let parent = open.open_parent(opener, &info)?;
    let ground = open.ground();
    let below = ground.description();
    let size = info.blocks * u64::from(PAGE_BYTES);
    let kind = if info.is_read_only { "snapshot" } else { "volume" };
    let store = open.name();
    let mut description =
        format!("{kind} `{name}` of {size} bytes, of store `{store}` over {below}");
    let mut found = format!("{} of {size} bytes written", info.mapped * u64::from(PAGE_BYTES));
    let handles = ground.members.iter().flat_map(|member| &member.opened.handles);
    let mut handles: Vec<_> = handles.cloned().collect();
    let identities = ground.members.iter().flat_map(|member| &member.opened.identities);
    let mut identities: Vec<_> = identities.cloned().collect();
    drop(ground);
    if let Some(parent) = &parent {
        description += &format!("; the rest is read from {}", parent.opened.description);
        found += &format!(", and the rest a clone of {}", parent.uri);
        handles.extend_from_slice(&parent.opened.handles);
        identities.extend_from_slice(&parent.opened.identities);
    }
    let is_anything = info.mapped > 0 || parent.is_some();
    let existing = is_anything.then(|| Existing { name: uri.to_string(), found, path: None });
    let medium = Volume::open(open, &info, parent).map_err(|problem| uri.refuse(problem))?;
    if medium.is_written {
        open.claim()?;
    } else if let Some(owner) = open.other_owner() {
        // Blocks of a snapshot that is deleted there would be others' here.
        return Err(open.refuse(&StoreError::Owned { by: Box::new(owner) }));
    }
    let medium = medium.for_others();
    let existing = existing.filter(|_| !info.is_read_only).into_iter().collect();
    Ok(Opened { medium: Arc::new(medium), description, existing, handles, identities })
}

impl OpenStore {
    /// Opens the store on the device that is named, unless this process has it open already.
    ///
    /// # Errors
    ///
    /// If the device cannot be had, or there is no store on it that can be opened.
    pub fn open(opener: &Opener<'_>, place: &Place) -> Result<Arc<Self>, MediumError> {
        once::open(opener, place)
    }

    /// Opens the one on a device that is open.
    fn over(
        opener: &Opener<'_>,
        place: &Place,
        below: Opened,
        closing_max: Span,
    ) -> Result<Self, MediumError> {
        let (regions, clock) = (opener.regions, opener.clock);
        let mut ground = Ground::first(&place.store, below)?;
        let owns = owned::Opener::draw();
        let me = Some(owns.owner());
        let (first, shape) = (Arc::clone(&ground.medium), ground.shape);
        let mut opened = make::look(opener, place, &*first, &shape, me)?;
        ground.open_others(opener, place, &opened.store, false)?;
        let name = place.store.to_string();
        let reserved = Reserved::new(&name, owns.owner().id, &ground);
        let mut excluded = None;
        if place.takes_over {
            excluded = reserved.take_over(&opened.store, place.force)?;
            // Until then the former owner may have changed it.
            let devices = opened.store.devices().clone();
            opened = make::look(opener, place, &*first, &shape, me)?;
            reserved.expect_same(&devices, opened.store.devices())?;
        }
        let claim = place.claim(&opened.store, excluded);
        opened.store.claim_as(claim);
        let (reserved, shape) = (Arc::new(reserved), ground.shape);
        let machine =
            |problem: String| MediumError::new(Blame::Machine, format!("{name}: {problem}"));
        let mut sleeper = Sleeper::new().map_err(|error| machine(error.to_string()))?;
        let shared = Arc::new(Shared::new(opened.store, sleeper.bell()));
        let backend = ground.medium.channel().map_err(machine)?;
        let desk = shared.join(None, true).map_err(machine)?;
        let owner = Owner::new(&name, Arc::clone(&shared), (desk, backend), shape, regions);
        let owner = owner.map_err(machine)?.with_reserved(&reserved);
        let owner = Thread::spawn("store", None, move |stop| {
            owner.run(stop, &clock, &mut sleeper, closing_max)
        })
        .map_err(|error| machine(format!("start a thread: {error}")))?;
        let (regions, identity) = (regions.clone(), identity(&place.store));
        let (ground, owner) = (Mutex::new(ground), Some(owner));
        Ok(Self { shared, ground, regions, clock, shape, name, identity, owner, owns, reserved })
    }

    /// Makes this process the one that writes to the store, before anything is changed: it is refused if
    /// somebody else has it open for writing and is not known to be gone.
    ///
    /// # Errors
    ///
    /// Who has it; or what the device answered.
    pub fn claim(&self) -> Result<(), MediumError> {
        self.ask(Ask::Claim).map(|_| ())
    }

    /// Has the devices refuse the writes of other hosts, unless the claim is going to be refused anyway.
    fn reserve(&self) -> Result<(), MediumError> {
        let owner = self.shared.lock().store.owner();
        let is_gone = |owner: &Owning| owned::is_gone(owner);
        match owner.filter(|owner| owner.id != self.owns.owner().id) {
            Some(owner) if is_gone(&owner) => self.reserved.acquire(Preempts::Gone(owner.id)),
            Some(_) => Ok(()),
            None => self.reserved.acquire(Preempts::Nothing),
        }
    }

    /// The process of this machine that has the store open for writing, if that is another one.
    pub fn owner_here(&self) -> Option<u32> {
        let owner = self.other_owner()?;
        let process = owned::process_of(&owner);
        let this = host::process::ProcessIdentity::this();
        (process.is_neighbor(&this) && process.pid != this.pid).then_some(process.pid)
    }

    /// Who else has it open for writing and is not known to be gone.
    fn other_owner(&self) -> Option<Owning> {
        let owner = self.shared.lock().store.owner()?;
        (owner.id != self.owns.owner().id && !owned::is_gone(&owner)).then_some(owner)
    }

    fn ground(&self) -> MutexGuard<'_, Ground> {
        self.ground.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A seat for somebody who moves data, and his way to the devices: he is told when there is more.
    fn way(&self, reads: Option<readers::Seat>) -> Result<(Arc<Desk>, Box<dyn Backend>), String> {
        let ground = self.ground();
        let desk = self.shared.join(reads, true)?;
        let way = ground.medium.channel();
        if way.is_err() {
            self.shared.leave(&desk, core::iter::empty());
        }
        Ok((desk, way?))
    }

    /// Asks something that moves no data, and waits for the answer.
    fn ask(&self, ask: Ask) -> Result<Answer, MediumError> {
        self.converse(ask, &mut |_| Err(Outcome::ABORTED))
    }

    /// Asks something, has `carry` move the data, and waits for the answer.
    fn converse(&self, ask: Ask, carry: &mut Carry<'_>) -> Result<Answer, MediumError> {
        self.converse_if(ask, carry, |_| Ok(()))
    }

    /// The same, if `admit` has nothing against it in the moment in which it is asked.
    fn converse_if(
        &self,
        ask: Ask,
        carry: &mut Carry<'_>,
        admit: impl FnOnce(&State) -> Result<(), MediumError>,
    ) -> Result<Answer, MediumError> {
        let machine =
            |problem| MediumError::new(Blame::Machine, format!("{}: {problem}", self.name));
        if reserved::changes(&ask) {
            self.reserve()?;
        }
        let desk = self.shared.join(None, false).map_err(machine)?;
        let mut state = self.shared.lock_to_tell();
        if let Err(refused) = admit(&state) {
            drop(state);
            self.shared.leave(&desk, core::iter::empty());
            return Err(refused);
        }
        state.ask(&desk, 0, ask);
        self.shared.sort(&mut state);
        drop(state);
        let (mut notes, until) = (Default::default(), self.clock.now().after(PATIENCE));
        let answer = loop {
            let hears = desk.bell.unmask(0);
            self.shared.lock().take_notes(&desk, &mut notes);
            let note = notes.pop_front();
            if let Some(Note::Ended(_, answer)) = note {
                break answer.map_err(|error| self.refuse(&error));
            }
            if let Some(Note::Do(action)) = note {
                self.carried(&action, &carry(&action));
                continue;
            }
            if self.clock.now() > until {
                break Err(MediumError::new(
                    Blame::Peer,
                    format!("{}: no answer in {PATIENCE}", self.name),
                ));
            }
            let nap = if hears { Span::from_secs(1) } else { Span::from_ms(1) };
            // What goes wrong with the wait makes the next look come sooner.
            let _ = desk.bell.wait(0, nap);
        };
        self.shared.leave(&desk, core::iter::empty());
        answer
    }

    /// Data have been moved, or have not.
    fn carried(&self, action: &Action, done: &Result<Copied, Outcome>) {
        let Some(io) = shared::transfer_of(action) else { return };
        let end = match done {
            Err(outcome) => End::Failed(*outcome),
            Ok(Copied::Data) => End::Done,
            Ok(Copied::Sums(sums)) => End::Sums(sums),
            Ok(Copied::Contents(holds)) => End::Contents(holds),
        };
        let mut state = self.shared.lock_to_tell();
        state.store.complete(io, end);
        self.shared.sort(&mut state);
    }

    fn refuse(&self, error: &StoreError) -> MediumError {
        refusal(&self.name, error)
    }

    /// The store's name.
    pub fn name(&self) -> String {
        self.shared.lock().store.name()
    }

    /// Which store it is.
    pub fn uuid(&self) -> u128 {
        self.shared.lock().store.uuid()
    }

    /// The last transaction that survives a loss of power.
    pub fn generation(&self) -> u64 {
        self.shared.lock().store.generation()
    }

    /// Why it takes no changes, if it has stopped and not recovered.
    pub fn stopped_because(&self) -> Option<String> {
        let state = self.shared.lock();
        let why = state.store.last_stop().filter(|_| state.store.is_stopped());
        why.map(ToString::to_string)
    }

    /// How often its device has failed, and completed writes that were not flushed may have been lost.
    pub fn losses(&self) -> u64 {
        self.shared.lock().store.losses()
    }

    /// The volume of this name.
    ///
    /// # Errors
    ///
    /// If there is none, or what describes it is damaged.
    pub fn find(&self, name: &str) -> Result<VolumeInfo, MediumError> {
        match self.ask(Ask::Find(name.into()))? {
            Answer::Volume(info) => Ok(info),
            _ => Err(self.refuse(&StoreError::NoVolume(name.into()))),
        }
    }

    /// All volumes, snapshots included, in the order in which they were made.
    ///
    /// # Errors
    ///
    /// If what lists them is damaged.
    pub fn list(&self) -> Result<Vec<VolumeInfo>, MediumError> {
        match self.ask(Ask::List)? {
            Answer::Volumes(volumes) => Ok(volumes),
            _ => Ok(Vec::new()),
        }
    }

    /// How much room the volume of this name takes, and how much of it others keep as well.
    ///
    /// # Errors
    ///
    /// If there is none, or its map is damaged.
    pub fn account(&self, name: &str) -> Result<Account, MediumError> {
        match self.ask(Ask::Account(name.into()))? {
            Answer::Account(account) => Ok(account),
            _ => Ok(Account::default()),
        }
    }

    /// How the room is used.
    ///
    /// # Errors
    ///
    /// If the store does not answer.
    pub fn usage(&self) -> Result<Option<Usage>, MediumError> {
        match self.ask(Ask::Usage)? {
            Answer::Usage(usage) => Ok(Some(usage)),
            _ => Ok(None),
        }
    }

    /// Makes a change, and returns once it survives a loss of power: with the volume as it is now,
    /// if there still is one.
    ///
    /// # Errors
    ///
    /// Why it was not made. What would take from a volume what somebody has open is refused.
    pub fn change(&self, change: Change) -> Result<Option<VolumeInfo>, MediumError> {
        let at_stake = self.at_stake(&change)?;
        let admit = |state: &State| self.admit(state, &change, at_stake.as_ref());
        let asked = Ask::Change(change.clone());
        match self.converse_if(asked, &mut |_| Err(Outcome::ABORTED), admit)? {
            Answer::Volume(info) => Ok(Some(info)),
            _ => Ok(None),
        }
    }

    /// Waits until what was deleted has been given back, or `at_most` has passed. Says whether it
    /// has. Where others go on with their volumes, nothing more is waited for.
    pub fn settle(&self, at_most: Span) -> bool {
        let until = self.clock.now().after(at_most);
        let is_settled = || {
            let state = self.shared.lock();
            let is_used = !state.used.is_empty() || !state.written.is_empty();
            state.store.is_idle() || (is_used && state.store.has_given_back())
        };
        while !is_settled() {
            if self.clock.now() > until {
                return false;
            }
            host::thread::rest(Span::from_ms(1));
        }
        true
    }
}

impl Drop for OpenStore {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            owner.stop_flag().stop();
            self.shared.ring();
            drop(owner);
        }
    }
}

impl Volume {
    fn open(
        open: &Arc<OpenStore>,
        info: &VolumeInfo,
        parent: Option<Outside>,
    ) -> Result<Self, String> {
        let ground = open.ground();
        let limits = limits(&ground.medium.limits(), &ground.shape, info);
        drop(ground);
        let limits = parent.iter().fold(limits, |limits, parent| parent.limit(limits));
        let is_written = limits.support.has(Operation::Write);
        let mut state = open.shared.lock();
        if is_written && state.written.contains(&info.id) {
            return Err("it is open already in this process, expected one who writes to it".into());
        }
        if is_written {
            state.written.push(info.id);
        }
        state.volumes_open += 1;
        drop(state);
        let (open, info) = (Arc::clone(open), info.clone());
        let block_count = Arc::new(AtomicU64::new(limits.block_count));
        Ok(Self { open, info, parent, limits, block_count, is_written, is_used: false })
    }

    /// The same, as somebody outside has it.
    fn for_others(mut self) -> Self {
        self.open.shared.lock().used.push(self.info.id);
        self.is_used = true;
        self
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let mut state = self.open.shared.lock();
        state.volumes_open -= 1;
        if self.is_written {
            state.written.retain(|id| *id != self.info.id);
        }
        let place = state.used.iter().position(|id| self.is_used && *id == self.info.id);
        if let Some(place) = place {
            state.used.swap_remove(place);
        }
    }
}

impl Medium for Volume {
    fn limits(&self) -> Limits {
        let block_count = self.block_count.load(Ordering::Relaxed);
        Limits { block_count, ..self.limits.clone() }
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let parent = self.parent.as_ref();
        let (limits, count) = (self.limits(), Arc::clone(&self.block_count));
        Ok(Box::new(VolumeChannel::open(&self.open, &self.info, parent, &limits, count)?))
    }

    /// Its UUID. The pool of a copied device has volumes of the same UUIDs.
    fn identity(&self) -> Option<String> {
        Some(format!("{:032x}", self.info.uuid))
    }

    fn notice_size(&self) -> Result<u64, String> {
        let volumes = self.open.list().map_err(|error| error.to_string())?;
        if let Some(now) = volumes.iter().find(|volume| volume.id == self.info.id)
            && self.block_count.fetch_max(now.blocks, Ordering::Relaxed) < now.blocks
        {
            self.open.shared.lock().told += 1;
        }
        Ok(self.block_count.load(Ordering::Relaxed))
    }

    fn channels_max(&self) -> u32 {
        // One is the owner's.
        let own = self.open.ground().medium.channels_max().saturating_sub(1);
        self.parent.as_ref().map_or(own, |parent| own.min(parent.opened.medium.channels_max()))
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let asked = self.open.ask(Ask::Extent { volume: self.info.id, block: lba });
        match asked.map_err(|error| error.to_string())? {
            Answer::Extent { blocks, is_parents: true, .. } => match &self.parent {
                Some(parent) => parent.extent(lba, blocks),
                None => Ok(Extent { blocks, holds: Holds::Data }),
            },
            Answer::Extent { blocks, at, .. } => {
                let holds = if at.is_some() { Holds::Data } else { Holds::Hole };
                Ok(Extent { blocks, holds })
            }
            _ => Ok(Extent { blocks: 0, holds: Holds::Data }),
        }
    }
}

impl Shape {
    fn of(uri: &Uri, limits: &Limits) -> Result<Self, MediumError> {
        let Limits { block_size, metadata_size, .. } = *limits;
        let request_bytes = limits.request_blocks_max.saturating_mul(block_size);
        let refuse = |problem: String| Err(MediumError::from(uri.refuse(problem)));
        if block_size > PAGE_BYTES || metadata_size != 0 {
            return refuse(format!(
                "it has blocks of {block_size} and {metadata_size} bytes of metadata, expected \
                 {PAGE_BYTES} at most and none"
            ));
        }
        if request_bytes < PAGE_BYTES {
            return refuse(format!(
                "it takes {request_bytes} bytes at once, expected {PAGE_BYTES} at least"
            ));
        }
        let needs = [Operation::Read, Operation::Flush];
        if let Some(lacks) = needs.into_iter().find(|need| !limits.support.has(*need)) {
            return refuse(format!("it has no {}, expected one", lacks.name()));
        }
        let blocks_in_page = u64::from(PAGE_BYTES / block_size);
        let pages = limits.block_count / blocks_in_page;
        Ok(Self { block_size, blocks_in_page, pages, request_pages: request_bytes / PAGE_BYTES })
    }
}

/// What a volume can do on a device that can do this.
fn limits(below: &Limits, shape: &Shape, info: &VolumeInfo) -> Limits {
    let reading = Support::of(&READING).common(below.support);
    let writing = [Operation::Write, Operation::Deallocate, Operation::WriteZeroes];
    let is_writable = below.support.has(Operation::Write) && !info.is_read_only;
    let support = match is_writable {
        true => writing.into_iter().fold(reading, Support::with),
        false => reading,
    };
    let (depth, pages) = match info.has_checksums {
        true => (bounce::DEPTH_MAX, bounce::REQUEST_PAGES_MAX),
        false => (DEPTH_MAX, REQUEST_PAGES_MAX),
    };
    Limits {
        block_size: PAGE_BYTES,
        metadata_size: 0,
        block_count: info.blocks,
        request_blocks_max: shape.request_pages.min(pages),
        segments_max: below.segments_max.min(257),
        optimal_boundary_blocks: 0,
        // What lies together in the volume may lie in several places of the device.
        atomic_write_blocks: 1,
        depth_max: below.depth_max.min(depth),
        durability: below.durability.weaker(Durability::VolatileCache),
        support,
    }
}

/// What a store has said, about a device.
fn refusal(name: &str, error: &StoreError) -> MediumError {
    let refused = MediumError::new(error.blame(), format!("{name}: {error}"));
    match error.hint() {
        Some(hint) => refused.with_hint(hint),
        None => refused,
    }
}

impl std::fmt::Debug for OpenStore {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("OpenStore").field(&self.name).finish()
    }
}
