//! An open store: questions in, reads, writes and flushes out, their ends in, answers out.
//!
//! ```text
//!   submit(token, ask) --> | tasks | --> next_action()   what the device is to do
//!   complete(io, end)  --> |       | --> next_answer()   token and outcome
//! ```
//!
//! A task is tried; if a page is missing, the page is asked for and the task is tried again when it
//! has come. Only tasks wait, never the store. Data never pass through here: an action names the
//! token, and which of its blocks go where.
//!
//! A write is answered when its data are on the device and the map in memory refers to them; it
//! survives a loss of power once a flush that was asked for later is answered. A
//! [`Change`](crate::Change) is answered once it survives.
//!
//! Whoever reads often may keep [runs](Store::mapped_run) of a map and read from the device by himself, for
//! as long as the volume is not among the [`remapped`](Store::next_remapped) ones; the store is told
//! how old the oldest such read is, and gives nothing out that it may touch.
//!
//! Whoever drives a store carries out [`next_action`](Store::next_action) until there is none before
//! he takes [`next_answer`](Store::next_answer): zeroes for a read are an action that nobody completes.

mod ask;
mod commit;
mod owned;
mod recover;
mod task;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use base::Outcome;

use crate::books::{Books, Stop};
use crate::cost::Leaves;
use crate::devices::Devices;
use crate::edit::FULL;
use crate::error::{Damage, Flaw, StoreError};
use crate::fence::{Claim, InjectedBugs, Owner};
use crate::format::{OwnerRecord, Page, SLOTS, Superblock, flags, unpadded};
use crate::level::{Level, Notice};
use crate::plan::Pending;
use crate::space::{CHANGE_BLOCKS, POOL_BLOCKS};
pub use ask::{Action, Answer, Ask, End, Run, Usage};
use commit::{Commit, Frozen};
use recover::Recovery;
use task::{Task, Wait};

/// An open store.
#[derive(Debug)]
pub struct Store {
    books: Books,
    /// What the last durable superblock says.
    durable: Frozen,
    tasks: BTreeMap<u64, Task>,
    ready: VecDeque<u64>,
    next_task: u64,
    on_page: BTreeMap<u64, Vec<u64>>,
    /// Tasks that wait for a transaction to be durable.
    on_commit: Vec<(u64, u64)>,
    /// Tasks that wait for a commit to be put together.
    on_apply: Vec<u64>,
    traffic: BTreeMap<u64, Traffic>,
    pending: Pending,
    /// Transfers of data that are on their way, by the transaction in which they began.
    transfers: BTreeMap<u64, u64>,
    /// The transaction in which the oldest read began that the store does not know of.
    oldest_read: u64,
    /// Transactions whose metadata somebody reads, one for each of them.
    held: Vec<u64>,
    ios: BTreeMap<u64, Purpose>,
    next_io: u64,
    commit: Commit,
    wants_commit: bool,
    /// What the superblock was when the last commit began.
    frozen: Superblock,
    /// Whether giving back has come upon damage in all that is left, or has no room; it is tried again
    /// after the next commit.
    is_sweep_stuck: bool,
    stopped: bool,
    /// Why it takes no changes, if it does not.
    stopped_by: Option<StoreError>,
    /// How often the device has made it stop, why the last time, how far a recovery from that is, and tasks
    /// that wait for it.
    losses: u64,
    last_stop: Option<StoreError>,
    recovery: Recovery,
    paused: VecDeque<u64>,
    /// It has recovered, and nothing was made durable since.
    is_unproven: bool,
    /// Who writes to it here, and whether the store may be taken from somebody.
    me: Option<Owner>,
    claim: Claim,
    bugs: InjectedBugs,
    level: Level,
    /// Whether the superblock that the store was opened with is known to be durable.
    is_anchored: bool,
    actions: VecDeque<Action>,
    answers: VecDeque<(u64, Result<Answer, StoreError>)>,
}

/// What an action was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Page(u64),
    Data(u64),
    Flush(u64),
    Commit,
    Recover,
}

/// What is going on with a volume.
#[derive(Debug, Default)]
struct Traffic {
    /// Writes that have been planned and are not done.
    writes: u64,
    /// Changes that wait for those, or are being made.
    quieting: u64,
    /// Tasks that wait for either.
    waiting: Vec<u64>,
}

impl Store {
    /// A store as its superblock describes it.
    pub(crate) fn new(
        store: u128,
        generation: u64,
        superblock: Superblock,
        devices: Arc<Devices>,
        cache_bytes: usize,
    ) -> Self {
        let owner = OwnerRecord::NONE;
        let durable = Frozen { generation, superblock, devices: Arc::clone(&devices), owner };
        Self {
            books: Books::new(store, generation, superblock, devices, cache_bytes),
            durable,
            tasks: BTreeMap::new(),
            ready: VecDeque::new(),
            next_task: 0,
            on_page: BTreeMap::new(),
            on_commit: Vec::new(),
            on_apply: Vec::new(),
            traffic: BTreeMap::new(),
            pending: Pending::new(),
            transfers: BTreeMap::new(),
            oldest_read: u64::MAX,
            held: Vec::new(),
            ios: BTreeMap::new(),
            next_io: 0,
            commit: Commit::Idle,
            wants_commit: false,
            frozen: superblock,
            is_sweep_stuck: false,
            stopped: false,
            stopped_by: None,
            losses: 0,
            last_stop: None,
            recovery: Recovery::Idle,
            paused: VecDeque::new(),
            is_unproven: false,
            me: None,
            claim: Claim::Free,
            bugs: InjectedBugs::default(),
            level: Level::default(),
            is_anchored: false,
            actions: VecDeque::new(),
            answers: VecDeque::new(),
        }
    }

    /// Splits nodes of trees as soon as they have more than so many records, 4 at least, instead of
    /// when they are full. The trees of a small store become as high as those of a large one, which
    /// is what tests want.
    #[must_use]
    pub fn with_fanout(mut self, records: usize) -> Self {
        self.books.full = records.clamp(4, FULL);
        self.books.keep_more();
        self
    }

    /// Which store it is.
    pub const fn uuid(&self) -> u128 {
        self.books.store
    }

    /// The store's name.
    pub fn name(&self) -> String {
        unpadded(&self.books.superblock.name)
    }

    /// The last transaction that survives a loss of power.
    pub const fn generation(&self) -> u64 {
        self.durable.generation
    }

    /// Blocks in the store, superblocks included.
    pub const fn blocks(&self) -> u64 {
        self.durable.superblock.blocks
    }

    /// The devices that it lies on, as the last durable superblock says.
    pub fn devices(&self) -> &Devices {
        &self.durable.devices
    }

    /// The devices that it is to lie on once the open transaction is durable.
    pub fn next_devices(&self) -> &Devices {
        &self.books.devices
    }

    /// The first block that no superblock has ever counted, nor one that is being written.
    pub(crate) const fn reach(&self) -> u64 {
        self.books.superblock.blocks
    }

    /// Where the copies of the last durable superblock lie.
    pub const fn superblocks(&self) -> [u64; 2] {
        Superblock::places(self.durable.generation, self.durable.superblock.front())
    }

    /// Which store it is, and what the last durable superblock says.
    pub(crate) const fn durable(&self) -> (u128, Superblock) {
        (self.books.store, self.durable.superblock)
    }

    /// The transaction that is open.
    pub const fn transaction(&self) -> u64 {
        self.books.generation
    }

    /// The run of a volume's map that has a block, if it is mapped and that can be said without
    /// reading anything. None of a volume with checksums: its data pass through whoever has those.
    pub fn mapped_run(&mut self, volume: u64, block: u64) -> Option<Run> {
        if self.is_recovering() || self.is_taken_over() {
            return None;
        }
        let body = self.books.volume(volume).ok().flatten().filter(|body| block < body.blocks)?;
        if body.has(flags::CHECKSUMS) {
            return None;
        }
        let run = self.books.next_run(&body.tree(), body.map, block).ok().flatten()?;
        self.books.cache.settle();
        let blocks = run.extra.min(body.blocks.saturating_sub(run.key));
        let is_there = run.key <= block && run.is_written();
        is_there.then_some(Run { block: run.key, blocks, at: run.value })
    }

    /// A volume of which blocks that were mapped may lie elsewhere from now on, or nowhere: runs of it
    /// that anybody has kept are no longer true. To be asked, until there is none, before an answer is
    /// passed on.
    pub fn next_remapped(&mut self) -> Option<u64> {
        self.books.remapped.pop_first()
    }

    /// Something to be told of the room. To be asked now and then, best until there is none: nobody
    /// else looks how full the store is.
    pub fn next_notice(&mut self) -> Option<Notice> {
        let Usage { blocks, free, kept, promised, thresholds, .. } = self.usage();
        let kept = kept + promised;
        let room = blocks.saturating_sub(2 * SLOTS + kept);
        let taken = room.saturating_sub(free.saturating_sub(kept));
        self.level.next(thresholds, taken, room)
    }

    /// Reads by kept runs are under way that began in this transaction and later, and none that began
    /// before; `u64::MAX` if there is none.
    pub fn note_oldest_read(&mut self, transaction: u64) {
        if std::mem::replace(&mut self.oldest_read, transaction) < transaction {
            self.release();
            self.look_again();
        }
    }

    /// What the last durable superblock leads to, as a store of its own that is only read. Until
    /// [`let_go`](Self::let_go) is called with its generation, none of its metadata is written over,
    /// whatever happens to this one.
    #[must_use]
    pub fn hold_still(&mut self) -> Self {
        let Frozen { generation, superblock, devices, .. } = self.durable.clone();
        self.held.push(generation);
        Self::new(self.books.store, generation, superblock, devices, 0)
    }

    /// Somebody who read the metadata of a transaction does not any more.
    pub fn let_go(&mut self, generation: u64) {
        if let Some(place) = self.held.iter().position(|held| *held == generation) {
            self.held.swap_remove(place);
        }
        self.release();
        self.look_again();
    }

    /// Whether there is room only because metadata are kept for somebody who reads them: he ought to let
    /// go.
    pub fn lacks_what_is_held(&self) -> bool {
        let space = &self.books.space;
        let (held, free) =
            (space.kept_for_readers(self.durable.generation), space.free(&self.books.superblock));
        held > 0 && free < space.kept + held + self.books.reserve()
    }

    /// Bytes of metadata in memory now.
    pub fn memory_bytes(&self) -> usize {
        let pages = self.books.cache.len() + self.books.dirty.len() + self.books.writing.len();
        pages * crate::format::BLOCK_BYTES
    }

    /// Whether nothing is asked, under way, or left to be given back.
    pub fn is_idle(&self) -> bool {
        let is_still = matches!(self.commit, Commit::Idle) && !self.wants_commit;
        !self.has_tasks() && self.ios.is_empty() && is_still && self.has_given_back()
    }

    /// Whether something is asked that was not answered.
    pub fn has_tasks(&self) -> bool {
        !self.tasks.is_empty()
    }

    /// Whether all that is no longer needed has been given back, as far as that can be done now.
    pub fn has_given_back(&self) -> bool {
        self.stopped || self.is_sweep_stuck || self.books.superblock.work.is_none()
    }

    /// Asks something. The answer bears `token`.
    pub fn submit(&mut self, token: u64, ask: Ask) {
        let id = self.next_task;
        self.next_task += 1;
        self.tasks.insert(id, Task::new(token, ask));
        self.ready.push_back(id);
    }

    /// The next thing that the device is to do; `None` if there is nothing before something is
    /// asked or completed.
    pub fn next_action(&mut self) -> Option<Action> {
        if self.actions.is_empty() {
            self.turn();
        }
        self.actions.pop_front()
    }

    /// The next answer. Those to what was asked may come in any order.
    pub fn next_answer(&mut self) -> Option<(u64, Result<Answer, StoreError>)> {
        self.answers.pop_front()
    }

    /// An action has ended. Whoever reports one that is not under way is not heard.
    pub fn complete(&mut self, io: u64, end: End<'_>) {
        match self.ios.remove(&io) {
            Some(Purpose::Page(address)) => self.handle_page(address, end),
            Some(Purpose::Data(task) | Purpose::Flush(task)) => self.handle_transfer(task, io, end),
            Some(Purpose::Commit) => self.handle_commit(end),
            Some(Purpose::Recover) => self.handle_recovered(end),
            None => {}
        }
        self.turn();
    }

    fn handle_page(&mut self, address: u64, end: End<'_>) {
        let page = match end {
            End::Read(bytes) => Page::decode(bytes, self.books.store, address),
            End::Failed(outcome) => Err(Damage::at(address, Flaw::Unread(outcome))),
            End::Done | End::Sums(_) | End::Slots(_) | End::Contents(_) => {
                Err(Damage::at(address, Flaw::Unread(Outcome::INTERNAL_ERROR)))
            }
        };
        self.books.handle_read(address, page);
        // They run before anything else is read, so what they waited for is still there.
        for task in self.on_page.remove(&address).unwrap_or_default() {
            self.run(task);
        }
        self.turn();
        self.books.damaged.remove(&address);
    }

    /// Does what can be done now.
    fn turn(&mut self) {
        loop {
            self.apply();
            while let Some(task) = self.ready.pop_front() {
                self.run(task);
            }
            // To give back may itself want a commit first.
            if !self.begin_commit() && !self.sweep() && !self.begin_commit() {
                return self.look_again();
            }
        }
    }

    /// Has a page read, unless it is being read.
    fn ask_for(&mut self, address: u64) {
        if !self.on_page.contains_key(&address) {
            let io = self.enter(Purpose::Page(address));
            self.actions.push_back(Action::ReadPage { io, at: address });
            self.on_page.insert(address, Vec::new());
        }
    }

    fn enter(&mut self, purpose: Purpose) -> u64 {
        let io = self.next_io;
        self.next_io += 1;
        self.ios.insert(io, purpose);
        io
    }

    /// Whether nothing has been changed since the last commit began.
    fn is_clean(&self) -> bool {
        let is_same = self.frozen == self.books.superblock;
        is_same && self.books.dirty.is_empty() && self.books.space.deltas.len() == 0
    }

    /// Lets a task wait.
    fn wait(&mut self, task: u64, wait: Wait) {
        match wait {
            Wait::Page(address) => {
                self.ask_for(address);
                self.on_page.entry(address).or_default().push(task);
            }
            Wait::Commit(generation) => {
                let is_open = generation == self.books.generation;
                self.wants_commit |= is_open && !self.commit.is_gathering();
                self.on_commit.push((generation, task));
            }
            Wait::Apply => self.on_apply.push(task),
            Wait::Volume(id) => self.traffic.entry(id).or_default().waiting.push(task),
            Wait::Transfers => {}
        }
    }

    /// What a change is kept waiting by: a commit that is being put together, or one that is so far
    /// behind that memory would fill.
    fn may_change(&mut self) -> Result<(), Wait> {
        let is_tight = !self.is_clean() && !self.has_room()?;
        match &self.commit {
            Commit::Applying => Err(Wait::Apply),
            Commit::Idle if is_tight || self.backlog() > BACKLOG => {
                self.wants_commit = true;
                Err(Wait::Apply)
            }
            Commit::Idle => Ok(()),
            _ if is_tight || self.backlog() > BACKLOG_MAX => {
                Err(Wait::Commit(self.durable.generation + 1))
            }
            _ => Ok(()),
        }
    }

    /// Whether there is room for one change more, and a commit then.
    fn has_room(&mut self) -> Result<bool, Wait> {
        match self.books.has_room_for_commit(POOL_BLOCKS) {
            Err(Stop::Need(address)) => Err(Wait::Page(address)),
            // Whoever comes upon the damage again says so.
            has_room => Ok(has_room.unwrap_or(true)),
        }
    }

    /// Pages and ranges that the next commit will have to write.
    fn backlog(&self) -> usize {
        self.books.dirty.len() + self.books.space.deltas.len()
    }

    /// Gives back a little of what is no longer needed. False if there is nothing to do, or it has
    /// to wait.
    fn sweep(&mut self) -> bool {
        let is_done = self.books.superblock.work.is_none();
        if self.stopped || self.is_sweep_stuck || is_done {
            return false;
        }
        if !self.is_anchored {
            // Who may not have the store leaves it as it is.
            if self.may_claim().is_ok() {
                self.anchor();
            }
            return false;
        }
        if let Err(wait) = self.may_change() {
            if let Wait::Page(address) = wait {
                self.ask_for(address);
            }
            return false;
        }
        let swept = match self.books.fill_pool(CHANGE_BLOCKS, Leaves::Nothing) {
            Ok(()) => self.books.attempt_in_steps(Books::sweep),
            Err(stop) => Err(stop),
        };
        match swept {
            Ok(did) => {
                let is_done = self.books.superblock.work.is_none();
                self.wants_commit |= is_done;
                self.is_sweep_stuck = !did && !is_done;
                self.books.cache.settle();
                did
            }
            Err(Stop::Need(address)) => {
                self.ask_for(address);
                false
            }
            Err(Stop::Full | Stop::Short(_)) => {
                self.is_sweep_stuck = self.is_clean();
                self.wants_commit |= !self.is_sweep_stuck;
                false
            }
            // What is damaged is named by a check; nothing else is held up by it.
            Err(Stop::Error(_)) => {
                self.is_sweep_stuck = !self.books.skip_work();
                !self.is_sweep_stuck
            }
        }
    }
}

/// Pages and ranges that may be waiting for a commit to begin while another is under way.
const BACKLOG_MAX: usize = 4096;
/// Pages and ranges that make a commit begin although nobody asks for it.
const BACKLOG: usize = 1024;
