//! A store over a device that remembers what was not flushed, driven in an order drawn from a seed.

#![allow(dead_code, reason = "each program that uses the rig uses a part of it")]
#![allow(unreachable_pub, reason = "each program that uses the rig has it as a module")]

pub mod compare;
pub mod disk;
pub mod model;
pub mod world;

use std::collections::BTreeMap;

use base::Random;
use disk::{Disk, Image, ZEROES, stamped};
use tenmil_volume::format::OwnerRecord;
use tenmil_volume::{Action, Answer, Ask, Check, Claim, End, NewStore, Opened, Opening, Owner};
use tenmil_volume::{Report, Step};
use tenmil_volume::{Store, StoreError, VolumeInfo, checksum};

/// A store and its device.
pub struct Rig {
    pub store: Store,
    pub disk: Disk,
    pub random: Random,
    /// What the store wants done.
    under_way: Vec<Action>,
    /// Data of reads and writes, by token.
    pub buffers: BTreeMap<u64, Vec<disk::Shared>>,
    pub answers: BTreeMap<u64, Result<Answer, StoreError>>,
    next_token: u64,
    /// The next data write is answered with an error.
    pub fails_writes: bool,
    /// The next data write is answered with an error, and comes to pass when it is let.
    pub fails_late: bool,
    late: Vec<u64>,
    /// The next flush is answered with an error.
    pub fails_flushes: bool,
    /// The store recovers when it has stopped.
    pub recovers: bool,
    losses: u64,
    /// Flushes that were under way when one has told of a loss.
    fails_too: Vec<u64>,
    /// The next read from a parent is answered with an error.
    pub fails_parent: bool,
    /// So many writes of pages and superblocks from now on, one is answered with an error.
    pub fails_pages: Option<u64>,
    /// Pages that were read.
    pub reads: u64,
    /// How often the superblocks at the start were read.
    pub slot_reads: u64,
    /// These actions stay under way.
    pub held: Vec<u64>,
    /// Transfers of data stay under way.
    pub holds_data: bool,
    /// Flushes stay under way, so that no commit ends.
    pub holds_flushes: bool,
    /// The next data write is answered as if it had been done.
    pub loses_writes: bool,
    /// The next data write goes to this block of the device instead.
    pub astray: Option<u64>,
    /// Where the last data write went that was answered with an error.
    pub failed_at: Option<u64>,
}

pub const CACHE_BYTES: usize = 1 << 20;

/// The image of a new store.
pub fn new_store(blocks: u64) -> Image {
    let mut image = Image::new();
    let new = NewStore { name: "proof".into(), uuid: 0x7e57, blocks };
    for step in new.steps().unwrap() {
        if let Step::Write { at, bytes } = step {
            image.insert(at, (*bytes).into());
        }
    }
    image
}

/// Somebody who opens stores.
pub fn owner(id: u64) -> Owner {
    let mut host = [0; 64];
    host[..4].copy_from_slice(b"host");
    let pid = u32::try_from(id % 1000).unwrap();
    Owner { id: u128::from(id) | 1 << 100, record: OwnerRecord { pid, host, ..OwnerRecord::NONE } }
}

/// Opens the store in an image, to read.
pub fn open(image: &Image, blocks: u64) -> Result<Opened, StoreError> {
    read_in(image, Opening::new(blocks, CACHE_BYTES))
}

/// Opens it, to write.
pub fn open_as(image: &Image, blocks: u64, owner: Owner) -> Result<Opened, StoreError> {
    read_in(image, Opening::new(blocks, CACHE_BYTES).to_write(owner))
}

/// Whoever had it open was killed, or lost power.
pub fn take_over(mut store: Store) -> Store {
    if let Some(former) = store.owner() {
        store.claim_as(Claim::Over(former.id));
    }
    store
}

fn read_in(image: &Image, mut opening: Opening) -> Result<Opened, StoreError> {
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(image.get(&at).map_or(&ZEROES, |block| &**block)));
    }
    opening.finish()
}

/// Checks the store in an image.
pub fn check(store: &Store, image: &Image) -> Report {
    let mut check = Check::of(store);
    while let Some(at) = check.next_read() {
        check.handle_read(Ok(image.get(&at).map_or(&ZEROES, |block| &**block)));
    }
    check.finish()
}

impl Rig {
    /// A rig with low trees or high ones.
    pub fn new(image: Image, blocks: u64, mut random: Random) -> Result<Self, StoreError> {
        let fanout = if random.chance(1, 4) { 168 } else { 4 + random.below(12) };
        let mut rig = Self::plain(image, blocks, random)?;
        rig.store = rig.store.with_fanout(usize::try_from(fanout).unwrap());
        Ok(rig)
    }

    /// A rig with trees as they are.
    pub fn plain(image: Image, blocks: u64, random: Random) -> Result<Self, StoreError> {
        let mut random = random;
        let store = take_over(open_as(&image, blocks, owner(random.draw()))?.store);
        Ok(Self {
            store,
            disk: Disk::new(image),
            random,
            under_way: Vec::new(),
            buffers: BTreeMap::new(),
            answers: BTreeMap::new(),
            next_token: 0,
            fails_writes: false,
            fails_late: false,
            late: Vec::new(),
            fails_flushes: false,
            recovers: false,
            losses: 0,
            fails_too: Vec::new(),
            fails_parent: false,
            fails_pages: None,
            reads: 0,
            slot_reads: 0,
            held: Vec::new(),
            holds_data: false,
            holds_flushes: false,
            loses_writes: false,
            astray: None,
            failed_at: None,
        })
    }

    pub fn submit(&mut self, ask: Ask) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        if let Ask::Read { blocks, .. } | Ask::Own { blocks, .. } | Ask::Fill { blocks, .. } = ask {
            let unread = stamped(u64::MAX);
            self.buffers.insert(token, vec![unread; usize::try_from(blocks).unwrap()]);
        }
        self.store.submit(token, ask);
        token
    }

    /// Writes blocks that all bear one value.
    pub fn submit_write(&mut self, volume: u64, block: u64, blocks: u64, value: u64) -> u64 {
        let token = self.submit(Ask::Write { volume, block, blocks });
        self.buffers.insert(token, vec![stamped(value); usize::try_from(blocks).unwrap()]);
        token
    }

    /// Does one thing that the store wants done, whichever. False if there is none.
    pub fn step(&mut self) -> bool {
        self.begin();
        let is_held = |action: &Action| match action {
            Action::ReadData { io, .. } | Action::WriteData { io, .. } => {
                self.holds_data || self.held.contains(io)
            }
            Action::Flush { .. } => self.holds_flushes,
            _ => false,
        };
        let may = |(index, action): (usize, &Action)| (!is_held(action)).then_some(index);
        let choice: Vec<usize> = self.under_way.iter().enumerate().filter_map(may).collect();
        if choice.is_empty() {
            self.collect();
            return false;
        }
        let index = self.random.below(choice.len() as u64);
        let action = self.under_way.swap_remove(choice[usize::try_from(index).unwrap()]);
        self.carry_out(action);
        self.begin();
        self.collect();
        true
    }

    /// Begins all that the store wants done, and ends nothing but zeroes for reads: those nobody completes,
    /// and they are there before an answer is.
    pub fn begin(&mut self) {
        loop {
            while let Some(action) = self.store.next_action() {
                self.issue(&action);
                match action {
                    Action::Zero { .. } => self.carry_out(action),
                    _ => self.under_way.push(action),
                }
            }
            if !self.recovers
                || std::mem::replace(&mut self.losses, self.store.losses()) == self.losses
            {
                return;
            }
            assert!(self.store.recover(), "{:?}", self.store.stopped_by());
        }
    }

    fn collect(&mut self) {
        while let Some((token, answer)) = self.store.next_answer() {
            assert!(self.answers.insert(token, answer).is_none(), "answered twice");
        }
    }

    fn issue(&mut self, action: &Action) {
        match action {
            Action::WritePages { io, at, bytes } => {
                for (index, block) in (0..).zip(bytes.chunks_exact(4096)) {
                    let block: [u8; 4096] = block.try_into().unwrap();
                    self.disk.issue_write(*io, at + index, block.into());
                }
            }
            Action::WriteData { io, token, offset, at, blocks, .. } => {
                let at = self.astray.take().unwrap_or(*at);
                for index in 0..*blocks {
                    let data =
                        self.buffers[token][usize::try_from(offset + index).unwrap()].clone();
                    self.disk.issue_write(*io, at + index, data);
                }
            }
            Action::Flush { io } => self.disk.issue_flush(*io),
            _ => {}
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::ReadSlots { io } => {
                self.slot_reads += 1;
                let slots = [*self.disk.read(0), *self.disk.read(1)];
                self.store.complete(io, End::Slots(&slots));
            }
            Action::ReadPage { io, at } => {
                let block = self.disk.read(at);
                self.reads += 1;
                self.store.complete(io, End::Read(&block));
            }
            Action::WriteData { io, at, .. } if self.fails_writes => {
                self.failed_at = Some(at);
                self.disk.drop_write(io);
                self.fails_writes = false;
                self.store.complete(io, End::Failed(base::Outcome::WRITE_FAULT));
            }
            Action::WriteData { io, .. } if self.fails_late => {
                self.fails_late = false;
                self.late.push(io);
                self.store.complete(io, End::Failed(base::Outcome::WRITE_FAULT));
            }
            Action::WritePages { io, .. } if self.fails_pages == Some(0) => {
                self.fails_pages = None;
                // It may still come to pass, and so nothing is dropped.
                self.store.complete(io, End::Failed(base::Outcome::WRITE_FAULT));
            }
            Action::WriteData { io, token, offset, blocks, is_summed: true, .. } => {
                if std::mem::take(&mut self.loses_writes) {
                    self.disk.drop_write(io);
                }
                self.disk.end_write(io);
                let written = &self.buffers[&token][usize::try_from(offset).unwrap()..];
                let written = &written[..usize::try_from(blocks).unwrap()];
                let sums: Vec<u32> = written.iter().map(|block| checksum(block)).collect();
                self.store.complete(io, End::Sums(&sums));
            }
            Action::WritePages { io, .. } | Action::WriteData { io, .. } => {
                if matches!(action, Action::WritePages { .. }) {
                    self.fails_pages = self.fails_pages.map(|left| left - 1);
                }
                self.disk.end_write(io);
                self.store.complete(io, End::Done);
            }
            Action::Flush { io } if self.disk.has_lost || self.fails_too.contains(&io) => {
                if std::mem::take(&mut self.disk.has_lost) {
                    let flush = |action: &Action| match action {
                        Action::Flush { io } => Some(*io),
                        _ => None,
                    };
                    self.fails_too = self.under_way.iter().filter_map(flush).collect();
                }
                self.store.complete(io, End::Failed(base::Outcome::WRITE_FAULT));
            }
            Action::Flush { io } if self.fails_flushes => {
                self.fails_flushes = false;
                self.store.complete(io, End::Failed(base::Outcome::WRITE_FAULT));
            }
            Action::Flush { io } => match self.disk.end_flush(io) {
                true => self.store.complete(io, End::Done),
                // Others have still to do it.
                false => self.under_way.push(action),
            },
            Action::ReadData { io, token, offset, at, blocks, is_summed } => {
                for index in 0..blocks {
                    let block = self.disk.read(at + index);
                    let place = usize::try_from(offset + index).unwrap();
                    self.buffers.get_mut(&token).unwrap()[place] = block;
                }
                let read = &self.buffers[&token][usize::try_from(offset).unwrap()..];
                let read = &read[..usize::try_from(blocks).unwrap()];
                let sums: Vec<u32> = read.iter().map(|block| checksum(block)).collect();
                self.store.complete(io, if is_summed { End::Sums(&sums) } else { End::Done });
            }
            Action::ReadParent { io, .. } if self.fails_parent => {
                self.fails_parent = false;
                self.store.complete(io, End::Failed(base::Outcome::UNRECOVERED_READ));
            }
            Action::ReadParent { io, token, offset, block, blocks } => {
                for index in 0..blocks {
                    let place = usize::try_from(offset + index).unwrap();
                    let value = stamped(model::parent_value(block + index));
                    self.buffers.get_mut(&token).unwrap()[place] = value;
                }
                let holds = |index| model::parent_value(block + index) != 0;
                let holds: Vec<bool> = (0..blocks).map(holds).collect();
                self.store.complete(io, End::Contents(&holds));
            }
            Action::Zero { token, offset, blocks } => {
                for index in offset..offset + blocks {
                    let place = usize::try_from(index).unwrap();
                    self.buffers.get_mut(&token).unwrap()[place] = stamped(0);
                }
            }
        }
    }

    /// Has the writes come to pass that were answered with an error and are late.
    pub fn land_late(&mut self) {
        assert!(!self.late.is_empty(), "something is late");
        self.late.drain(..).for_each(|io| self.disk.end_write(io));
    }

    /// What is under way.
    pub fn under_way(&self) -> &[Action] {
        &self.under_way
    }

    /// Goes on until there is nothing to do.
    pub fn settle(&mut self) {
        while self.step() {}
    }

    /// Asks, and goes on until there is nothing to do.
    pub fn ask(&mut self, ask: Ask) -> Result<Answer, StoreError> {
        let token = self.submit(ask);
        self.settle();
        self.answers.remove(&token).expect("an answer")
    }

    /// Makes a volume thick, and has all of it lie in units of its own.
    pub fn inflate(&mut self, name: &str) -> Result<VolumeInfo, StoreError> {
        let Answer::Volume(info) = self.ask(Ask::Thicken(name.into()))? else {
            panic!("no volume")
        };
        let (volume, blocks, mut block) = (info.id, 32, 0);
        while block < info.blocks {
            let answer = self.ask(Ask::Own { volume, block, blocks })?;
            let Answer::Owned(to) = answer else { panic!("{answer:?}") };
            assert!(to > block, "it goes on");
            block = to;
        }
        // It may have taken units itself meanwhile.
        self.ask(Ask::Thicken(name.into()))?;
        Ok(info)
    }

    /// The values that blocks of a volume bear, one for each sector.
    pub fn read(
        &mut self,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Vec<[u64; 8]>, StoreError> {
        let token = self.submit(Ask::Read { volume, block, blocks });
        self.settle();
        self.answers.remove(&token).expect("an answer")?;
        let data = self.buffers.remove(&token).unwrap();
        Ok(data.iter().map(|block| disk::values(block)).collect())
    }
}
