//! A pool over a device that records unflushed writes, driven in an order drawn from a seed.

#![allow(dead_code, reason = "each program that uses the rig uses a part of it")]
#![allow(unreachable_pub, reason = "each program that uses the rig has it as a module")]

pub mod compare;
pub mod disk;
pub mod model;
pub mod world;

use std::collections::BTreeMap;

use disk::{Disk, Image, ZEROES, stamped};
use tenmil_base::Random;
use tenmil_volume::format::OwnerRecord;
use tenmil_volume::{
    ActionResult, Check, Claim, DeviceAction, Opened, Opening, Owner, PoolConfig, PoolRequest,
    PoolResponse,
};
use tenmil_volume::{Pool, PoolError, VolumeInfo, checksum};
use tenmil_volume::{Report, Step};

/// A pool and its device.
pub struct Rig {
    pub store: Pool,
    pub disk: Disk,
    pub random: Random,
    /// Actions of the pool in flight.
    under_way: Vec<DeviceAction>,
    /// Data of reads and writes, by token.
    pub buffers: BTreeMap<u64, Vec<disk::Shared>>,
    pub responses: BTreeMap<u64, Result<PoolResponse, PoolError>>,
    next_token: u64,
    /// The next data write fails.
    pub fails_writes: bool,
    /// The next data write fails, and reaches the device later on request.
    pub fails_late: bool,
    late: Vec<u64>,
    /// The next flush fails.
    pub fails_flushes: bool,
    /// The pool recovers after a stop.
    pub recovers: bool,
    losses: u64,
    /// Flushes that were in flight when another one reported a loss.
    fails_too: Vec<u64>,
    /// The next read from a parent fails.
    pub fails_parent: bool,
    /// After this number of writes of pages and superblocks, one fails.
    pub fails_pages: Option<u64>,
    /// Number of pages read.
    pub reads: u64,
    /// Number of reads of the superblocks at the start.
    pub slot_reads: u64,
    /// These actions stay in flight.
    pub held: Vec<u64>,
    /// Data transfers stay in flight.
    pub holds_data: bool,
    /// Flushes stay in flight, so that no commit ends.
    pub holds_flushes: bool,
    /// The next data write completes without having been done.
    pub loses_writes: bool,
    /// The next data write goes to this block of the device instead.
    pub astray: Option<u64>,
    /// Target of the last data write that failed.
    pub failed_at: Option<u64>,
}

pub const CACHE_BYTES: usize = 1 << 20;

/// Image of a new pool.
pub fn new_store(blocks: u64) -> Image {
    let mut image = Image::new();
    let new = PoolConfig { name: "proof".into(), uuid: 0x7e57, blocks };
    for step in new.steps().unwrap() {
        if let Step::Write { at, bytes } = step {
            image.insert(at, (*bytes).into());
        }
    }
    image
}

/// An owner that opens pools.
pub fn owner(id: u64) -> Owner {
    let mut host = [0; 64];
    host[..4].copy_from_slice(b"host");
    let pid = u32::try_from(id % 1000).unwrap();
    Owner { id: u128::from(id) | 1 << 100, record: OwnerRecord { pid, host, ..OwnerRecord::NONE } }
}

/// Opens the pool in an image, for reading.
pub fn open(image: &Image, blocks: u64) -> Result<Opened, PoolError> {
    read_in(image, Opening::new(blocks, CACHE_BYTES))
}

/// Opens it, for writing.
pub fn open_as(image: &Image, blocks: u64, owner: Owner) -> Result<Opened, PoolError> {
    read_in(image, Opening::new(blocks, CACHE_BYTES).to_write(owner))
}

/// The previous owner was killed, or lost power.
pub fn take_over(mut store: Pool) -> Pool {
    if let Some(former) = store.owner() {
        store.claim_as(Claim::Over(former.id));
    }
    store
}

fn read_in(image: &Image, mut opening: Opening) -> Result<Opened, PoolError> {
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(image.get(&at).map_or(&ZEROES, |block| &**block)));
    }
    opening.finish()
}

/// Checks the pool in an image.
pub fn check(store: &Pool, image: &Image) -> Report {
    let mut check = Check::of(store);
    while let Some(at) = check.next_read() {
        check.handle_read(Ok(image.get(&at).map_or(&ZEROES, |block| &**block)));
    }
    check.finish()
}

impl Rig {
    /// A rig with low or high trees.
    pub fn new(image: Image, blocks: u64, mut random: Random) -> Result<Self, PoolError> {
        let fanout = if random.chance(1, 4) { 168 } else { 4 + random.below(12) };
        let mut rig = Self::plain(image, blocks, random)?;
        rig.store = rig.store.with_fanout(usize::try_from(fanout).unwrap());
        Ok(rig)
    }

    /// A rig with normal trees.
    pub fn plain(image: Image, blocks: u64, random: Random) -> Result<Self, PoolError> {
        let mut random = random;
        let store = take_over(open_as(&image, blocks, owner(random.next_u64()))?.store);
        Ok(Self {
            store,
            disk: Disk::new(image),
            random,
            under_way: Vec::new(),
            buffers: BTreeMap::new(),
            responses: BTreeMap::new(),
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

    pub fn submit(&mut self, ask: PoolRequest) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        if let PoolRequest::Read { blocks, .. }
        | PoolRequest::MakeExclusive { blocks, .. }
        | PoolRequest::CopyFromParent { blocks, .. } = ask
        {
            let unread = stamped(u64::MAX);
            self.buffers.insert(token, vec![unread; usize::try_from(blocks).unwrap()]);
        }
        self.store.submit(token, ask);
        token
    }

    /// Writes blocks that all contain one value.
    pub fn submit_write(&mut self, volume: u64, block: u64, blocks: u64, value: u64) -> u64 {
        let token = self.submit(PoolRequest::Write { volume, block, blocks });
        self.buffers.insert(token, vec![stamped(value); usize::try_from(blocks).unwrap()]);
        token
    }

    /// Executes one random action of the pool. False if none is in flight.
    pub fn step(&mut self) -> bool {
        self.begin();
        let is_held = |action: &DeviceAction| match action {
            DeviceAction::ReadData { io, .. } | DeviceAction::WriteData { io, .. } => {
                self.holds_data || self.held.contains(io)
            }
            DeviceAction::Flush { .. } => self.holds_flushes,
            _ => false,
        };
        let may = |(index, action): (usize, &DeviceAction)| (!is_held(action)).then_some(index);
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

    /// Starts all actions of the pool, and completes none except zeroes for reads, which have no
    /// completion, and must be done before a response.
    pub fn begin(&mut self) {
        loop {
            while let Some(action) = self.store.next_action() {
                self.issue(&action);
                match action {
                    DeviceAction::Zero { .. } => self.carry_out(action),
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
        while let Some((token, response)) = self.store.next_response() {
            assert!(self.responses.insert(token, response).is_none(), "answered twice");
        }
    }

    fn issue(&mut self, action: &DeviceAction) {
        match action {
            DeviceAction::WritePages { io, at, bytes } => {
                for (index, block) in (0..).zip(bytes.chunks_exact(4096)) {
                    let block: [u8; 4096] = block.try_into().unwrap();
                    self.disk.issue_write(*io, at + index, block.into());
                }
            }
            DeviceAction::WriteData { io, token, offset, at, blocks, .. } => {
                let at = self.astray.take().unwrap_or(*at);
                for index in 0..*blocks {
                    let data =
                        self.buffers[token][usize::try_from(offset + index).unwrap()].clone();
                    self.disk.issue_write(*io, at + index, data);
                }
            }
            DeviceAction::Flush { io } => self.disk.issue_flush(*io),
            _ => {}
        }
    }

    fn carry_out(&mut self, action: DeviceAction) {
        match action {
            DeviceAction::ReadSlots { io } => {
                self.slot_reads += 1;
                let slots = [*self.disk.read(0), *self.disk.read(1)];
                self.store.complete(io, ActionResult::Slots(&slots));
            }
            DeviceAction::ReadPage { io, at } => {
                let block = self.disk.read(at);
                self.reads += 1;
                self.store.complete(io, ActionResult::Read(&block));
            }
            DeviceAction::WriteData { io, at, .. } if self.fails_writes => {
                self.failed_at = Some(at);
                self.disk.drop_write(io);
                self.fails_writes = false;
                self.store.complete(io, ActionResult::Failed(tenmil_base::IoStatus::WRITE_FAULT));
            }
            DeviceAction::WriteData { io, .. } if self.fails_late => {
                self.fails_late = false;
                self.late.push(io);
                self.store.complete(io, ActionResult::Failed(tenmil_base::IoStatus::WRITE_FAULT));
            }
            DeviceAction::WritePages { io, .. } if self.fails_pages == Some(0) => {
                self.fails_pages = None;
                // The write may still reach the device, so nothing is dropped.
                self.late.push(io);
                self.store.complete(io, ActionResult::Failed(tenmil_base::IoStatus::WRITE_FAULT));
            }
            DeviceAction::WriteData { io, token, offset, blocks, is_summed: true, .. } => {
                if std::mem::take(&mut self.loses_writes) {
                    self.disk.drop_write(io);
                }
                self.disk.end_write(io);
                let written = &self.buffers[&token][usize::try_from(offset).unwrap()..];
                let written = &written[..usize::try_from(blocks).unwrap()];
                let sums: Vec<u32> = written.iter().map(|block| checksum(block)).collect();
                self.store.complete(io, ActionResult::Sums(&sums));
            }
            DeviceAction::WritePages { io, .. } | DeviceAction::WriteData { io, .. } => {
                if matches!(action, DeviceAction::WritePages { .. }) {
                    self.fails_pages = self.fails_pages.map(|left| left - 1);
                }
                self.disk.end_write(io);
                self.store.complete(io, ActionResult::Done);
            }
            DeviceAction::Flush { io } if self.disk.has_lost || self.fails_too.contains(&io) => {
                if std::mem::take(&mut self.disk.has_lost) {
                    let flush = |action: &DeviceAction| match action {
                        DeviceAction::Flush { io } => Some(*io),
                        _ => None,
                    };
                    self.fails_too = self.under_way.iter().filter_map(flush).collect();
                }
                self.store.complete(io, ActionResult::Failed(tenmil_base::IoStatus::WRITE_FAULT));
            }
            DeviceAction::Flush { io } if self.fails_flushes => {
                self.fails_flushes = false;
                self.store.complete(io, ActionResult::Failed(tenmil_base::IoStatus::WRITE_FAULT));
            }
            DeviceAction::Flush { io } => match self.disk.end_flush(io) {
                true => self.store.complete(io, ActionResult::Done),
                // Other devices have yet to do it.
                false => self.under_way.push(action),
            },
            DeviceAction::ReadData { io, token, offset, at, blocks, is_summed } => {
                for index in 0..blocks {
                    let block = self.disk.read(at + index);
                    let place = usize::try_from(offset + index).unwrap();
                    self.buffers.get_mut(&token).unwrap()[place] = block;
                }
                let read = &self.buffers[&token][usize::try_from(offset).unwrap()..];
                let read = &read[..usize::try_from(blocks).unwrap()];
                let sums: Vec<u32> = read.iter().map(|block| checksum(block)).collect();
                self.store.complete(
                    io,
                    if is_summed { ActionResult::Sums(&sums) } else { ActionResult::Done },
                );
            }
            DeviceAction::ReadParent { io, .. } if self.fails_parent => {
                self.fails_parent = false;
                self.store
                    .complete(io, ActionResult::Failed(tenmil_base::IoStatus::UNRECOVERED_READ));
            }
            DeviceAction::ReadParent { io, token, offset, block, blocks } => {
                for index in 0..blocks {
                    let place = usize::try_from(offset + index).unwrap();
                    let value = stamped(model::parent_value(block + index));
                    self.buffers.get_mut(&token).unwrap()[place] = value;
                }
                let holds = |index| model::parent_value(block + index) != 0;
                let holds: Vec<bool> = (0..blocks).map(holds).collect();
                self.store.complete(io, ActionResult::Contents(&holds));
            }
            DeviceAction::Zero { token, offset, blocks } => {
                for index in offset..offset + blocks {
                    let place = usize::try_from(index).unwrap();
                    self.buffers.get_mut(&token).unwrap()[place] = stamped(0);
                }
            }
        }
    }

    /// Executes the failed writes that reach the device late.
    pub fn land_late(&mut self) {
        assert!(!self.late.is_empty(), "something is late");
        self.late.drain(..).for_each(|io| self.disk.end_write(io));
    }

    /// Actions in flight.
    pub fn under_way(&self) -> &[DeviceAction] {
        &self.under_way
    }

    /// Runs until idle.
    pub fn settle(&mut self) {
        while self.step() {}
    }

    /// Submits a request, and runs until idle.
    pub fn ask(&mut self, ask: PoolRequest) -> Result<PoolResponse, PoolError> {
        let token = self.submit(ask);
        self.settle();
        self.responses.remove(&token).expect("an answer")
    }

    /// Makes a volume thick, with all of its blocks in exclusive clusters.
    pub fn inflate(&mut self, name: &str) -> Result<VolumeInfo, PoolError> {
        let PoolResponse::Volume(info) = self.ask(PoolRequest::ReserveThick(name.into()))? else {
            panic!("no volume")
        };
        let (volume, blocks, mut block) = (info.id, 32, 0);
        while block < info.blocks {
            let response = self.ask(PoolRequest::MakeExclusive { volume, block, blocks })?;
            let PoolResponse::Owned(to) = response else { panic!("{response:?}") };
            assert!(to > block, "it goes on");
            block = to;
        }
        // It may have allocated clusters itself in the meantime.
        self.ask(PoolRequest::ReserveThick(name.into()))?;
        Ok(info)
    }

    /// Contents of blocks of a volume, one value per sector.
    pub fn read(
        &mut self,
        volume: u64,
        block: u64,
        blocks: u64,
    ) -> Result<Vec<[u64; 8]>, PoolError> {
        let token = self.submit(PoolRequest::Read { volume, block, blocks });
        self.settle();
        self.responses.remove(&token).expect("an answer")?;
        let data = self.buffers.remove(&token).unwrap();
        Ok(data.iter().map(|block| disk::values(block)).collect())
    }
}
