//! What a store is asked and answers, and what it wants of the device.

use base::Outcome;

use crate::account::Account;
use crate::devices::Devices;
use crate::fence::Slots;
use crate::format::Block;
use crate::parent::Parent;
use crate::volumes::{Change, VolumeInfo};

/// What a store is asked. Blocks have 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Something to be done with a volume as a whole.
    Change(Change),
    /// What is known of the volume with this name.
    Find(String),
    /// What is known of all volumes, in the order in which they were made.
    List,
    /// How much room the volume with this name takes, and how much of it others keep as well. Nodes
    /// of its trees that are its alone are read, and of the space map what counts its data.
    Account(String),
    /// How the room is used.
    Usage,
    /// A volume is to be promised room for all of its blocks: it is thick then, and owed the units that
    /// it has not. Answered when that survives a loss of power, or at once if it is so already.
    Thicken(String),
    /// Blocks of a thick volume are to lie in units of its own: the first stretch of those that do not,
    /// from one on. Whoever asks moves what has to be copied, first to himself and then from there.
    Own {
        /// Its number.
        volume: u64,
        /// The first block.
        block: u64,
        /// How many blocks whoever asks can keep: as many as a unit has at least.
        blocks: u64,
    },
    /// What a volume is read from where nothing is mapped.
    Parent {
        /// Its number.
        volume: u64,
    },
    /// Blocks of a volume that are its parent's are to be copied: the last ones. Whoever asks moves them,
    /// first to himself and then from there.
    Fill {
        /// Its number.
        volume: u64,
        /// How many blocks whoever asks can keep: one at least.
        blocks: u64,
    },
    /// How many blocks of a volume, from one on, are alike, or at least some of them: mapped in one
    /// run, all its parent's, or all reading as zeroes.
    Extent {
        /// Its number.
        volume: u64,
        /// The first block.
        block: u64,
    },
    /// The first blocks of a volume, from one on, that differ from those of another, as their maps
    /// tell: what was written meanwhile counts, whether or not it is something else.
    Difference {
        /// Its number.
        volume: u64,
        /// The number of the other; zero for one that was never written.
        base: u64,
        /// The first block.
        block: u64,
    },
    /// Blocks of a volume are to be read.
    Read {
        /// Its number.
        volume: u64,
        /// The first block.
        block: u64,
        /// How many.
        blocks: u64,
    },
    /// Blocks of a volume are to be written.
    Write {
        /// Its number.
        volume: u64,
        /// The first block.
        block: u64,
        /// How many.
        blocks: u64,
    },
    /// Blocks of a volume are to read as zeroes and take no room, unless it is thick.
    Trim {
        /// Its number.
        volume: u64,
        /// The first block.
        block: u64,
        /// How many.
        blocks: u64,
    },
    /// Whatever was answered before is to survive a loss of power.
    Flush,
    /// Whoever opened the store is to own it, before anything is changed: nobody else writes to it then.
    Claim,
    /// Nobody is to own the store any more, once all that was answered survives. It takes no changes then.
    Release,
    /// The store lies on these devices from now on: those that it has, which may be called otherwise,
    /// and what lies behind them. Those that are new have their labels already, durably. Answered when
    /// all superblocks on the first device say so, or at once if they do.
    Grow(Devices),
}

impl Ask {
    /// Whether it writes blocks of a volume to the device.
    pub(super) const fn writes_blocks(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Own { .. } | Self::Fill { .. })
    }
}

/// What comes of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is done.
    Done,
    /// The volume as it is now.
    Volume(VolumeInfo),
    /// All volumes.
    Volumes(Vec<VolumeInfo>),
    /// The room of a volume.
    Account(Account),
    /// All blocks before this one lie in units of the volume's own, or did a moment ago; it is the
    /// volume's end once all have been seen to.
    Owned(u64),
    /// What a volume is read from where nothing is mapped; none if that reads as zeroes.
    Parent(Option<Parent>),
    /// Blocks of a volume that are its parent's all lie before this one; it has no parent any more if
    /// that is the first.
    Filled(u64),
    /// Blocks that are alike.
    Extent {
        /// How many; zero only from the volume's end on.
        blocks: u64,
        /// The block of the store in which the first one lies, if they are mapped.
        at: Option<u64>,
        /// Whether they are the parent's. What is neither reads as zeroes.
        is_parents: bool,
    },
    /// Blocks that differ.
    Changed {
        /// The first one; the volume's end if there are none.
        block: u64,
        /// How many, or at least some of them. Zero only if there are none.
        blocks: u64,
        /// Whether they are mapped.
        is_mapped: bool,
        /// Whether they are the parent's. What is neither reads as zeroes now.
        is_parents: bool,
    },
    /// How the room is used.
    Usage(Usage),
}

/// How the room of a store is used, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// In the whole store, superblocks included.
    pub blocks: u64,
    /// Taken by data and metadata, as of the last commit: each once, however often it is shared.
    pub used: u64,
    /// May be given out now.
    pub free: u64,
    /// Kept for deletions and commits; no data are ever put there.
    pub kept: u64,
    /// Kept for thick volumes: for their maps at worst, and for units that they have not been given.
    pub promised: u64,
    /// Volumes, snapshots included.
    pub volumes: u64,
    /// Per cent of the room for data at which it is told that so much is taken; zero is none.
    pub thresholds: [u8; 2],
}

/// Blocks of a volume that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one.
    pub block: u64,
    /// How many.
    pub blocks: u64,
    /// The block of the store in which the first one lies.
    pub at: u64,
}

/// What the device is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read one block, and complete with its bytes.
    ReadPage {
        /// To be named when it is done.
        io: u64,
        /// Which block.
        at: u64,
    },
    /// Read the two superblocks at the start, and complete with their bytes.
    ReadSlots {
        /// To be named when it is done.
        io: u64,
    },
    /// Write these bytes: one block or several.
    WritePages {
        /// To be named when it is done.
        io: u64,
        /// The first block.
        at: u64,
        /// What is to be written.
        bytes: Vec<u8>,
    },
    /// Make all writes that are completed survive a loss of power.
    Flush {
        /// To be named when it is done.
        io: u64,
    },
    /// Move blocks from the device to whoever asked to read.
    ReadData {
        /// To be named when it is done.
        io: u64,
        /// Who asked.
        token: u64,
        /// The first of the blocks that were asked for, counted from zero.
        offset: u64,
        /// Where it lies.
        at: u64,
        /// How many blocks.
        blocks: u64,
        /// Whether it is to be completed with the checksums of what was read, which nobody may see
        /// before the answer.
        is_summed: bool,
    },
    /// Move blocks from the parent of the volume that was asked about to whoever asked.
    ReadParent {
        /// To be named when it is done.
        io: u64,
        /// Who asked.
        token: u64,
        /// The first of the blocks that were asked for, counted from zero.
        offset: u64,
        /// Which block of the parent.
        block: u64,
        /// How many blocks.
        blocks: u64,
    },
    /// Give zeroes to whoever asked to read. There is nothing to complete.
    Zero {
        /// Who asked.
        token: u64,
        /// The first of the blocks that were asked for, counted from zero.
        offset: u64,
        /// How many blocks.
        blocks: u64,
    },
    /// Move blocks from whoever asked to write to the device.
    WriteData {
        /// To be named when it is done.
        io: u64,
        /// Who asked.
        token: u64,
        /// The first of the blocks that were asked for, counted from zero.
        offset: u64,
        /// Where it goes.
        at: u64,
        /// How many blocks.
        blocks: u64,
        /// Whether it is to be completed with the checksums of what was written, which must not change
        /// meanwhile.
        is_summed: bool,
    },
}

/// How an action has ended.
#[derive(Clone, Copy, Debug)]
pub enum End<'a> {
    /// Done.
    Done,
    /// Done, and these bytes were read.
    Read(&'a Block),
    /// Done, and these are the superblocks at the start.
    Slots(&'a Slots),
    /// Done, and these are the checksums of the blocks that were moved.
    Sums(&'a [u32]),
    /// Done, and this is whether each block that was read from a parent holds anything but zeroes. One
    /// that holds none need not be copied.
    Contents(&'a [bool]),
    /// Not done.
    Failed(Outcome),
}
