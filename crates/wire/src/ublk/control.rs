//! Commands to `/dev/ublk-control`, and what a device says about itself.

use super::{READ, READ_WRITE, code, put, take};

/// ```text
///   0        4       6       8         16      24         26    28         32
///   | device | queue | bytes | address | data  | path len |     | reserved |
/// ```
///
/// `struct ublksrv_ctrl_cmd`. It lies in the command area of a submission entry of 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlCommand {
    /// Which device; [`ANY_DEVICE`] if the kernel is to pick a number.
    pub device: u32,
    /// Which queue; [`NO_QUEUE`] where it is about none.
    pub queue: u16,
    /// How long what lies at `address` is.
    pub len_bytes: u16,
    /// Where in the memory of the process the command finds what it takes, or leaves what it gives.
    pub address: u64,
    /// A number that some commands take.
    pub data: u64,
}

/// The kernel picks a number (`(__u32)-1`).
pub const ANY_DEVICE: u32 = u32::MAX;
/// About no queue (`(__u16)-1`).
pub const NO_QUEUE: u16 = u16::MAX;
/// Bytes of a command.
pub const COMMAND_BYTES: usize = COMMAND_SIZE as usize;
const COMMAND_SIZE: u16 = 32;

/// What is asked of `/dev/ublk-control` (`UBLK_U_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlOp {
    /// What a device is like: a [`DeviceInfo`].
    GetDeviceInfo,
    /// Makes a device: takes a [`DeviceInfo`] and gives one.
    AddDevice,
    /// Takes a device away, and waits until nobody has it any more.
    DeleteDevice,
    /// Shows the disk: waits until every request of every queue was asked for. Data: the process.
    StartDevice,
    /// Takes the disk away: waits for what is under way.
    StopDevice,
    /// What the disk will be like: [`Parameters`](super::Parameters).
    SetParameters,
    /// What the disk is like.
    GetParameters,
    /// A process has died, and this one goes on with its device.
    StartRecovery,
    /// The same, once every request was asked for. Data: the process.
    EndRecovery,
    /// What this kernel can do: [`Features`], eight bytes.
    GetFeatures,
    /// Takes a device away, and waits for nobody.
    DeleteDeviceAsync,
}

impl ControlOp {
    /// Every command, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::GetDeviceInfo,
        Self::AddDevice,
        Self::DeleteDevice,
        Self::StartDevice,
        Self::StopDevice,
        Self::SetParameters,
        Self::GetParameters,
        Self::StartRecovery,
        Self::EndRecovery,
        Self::GetFeatures,
        Self::DeleteDeviceAsync,
    ];

    /// Its code.
    pub const fn code(self) -> u32 {
        let (direction, number) = match self {
            Self::GetDeviceInfo => (READ, 0x02),
            Self::AddDevice => (READ_WRITE, 0x04),
            Self::DeleteDevice => (READ_WRITE, 0x05),
            Self::StartDevice => (READ_WRITE, 0x06),
            Self::StopDevice => (READ_WRITE, 0x07),
            Self::SetParameters => (READ_WRITE, 0x08),
            Self::GetParameters => (READ, 0x09),
            Self::StartRecovery => (READ_WRITE, 0x10),
            Self::EndRecovery => (READ_WRITE, 0x11),
            Self::GetFeatures => (READ, 0x13),
            Self::DeleteDeviceAsync => (READ, 0x14),
        };
        code(direction, COMMAND_SIZE, number)
    }

    /// What it does, as it stands in a refusal.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GetDeviceInfo => "ask what it is",
            Self::AddDevice => "make it",
            Self::DeleteDevice | Self::DeleteDeviceAsync => "take it away",
            Self::StartDevice => "show its disk",
            Self::StopDevice => "take its disk away",
            Self::SetParameters => "say what its disk is like",
            Self::GetParameters => "ask what its disk is like",
            Self::StartRecovery => "take it over",
            Self::EndRecovery => "go on with it",
            Self::GetFeatures => "ask what the kernel can do",
        }
    }
}

impl ControlCommand {
    /// A command about `device` as a whole, without anything in memory.
    pub const fn about(device: u32) -> Self {
        Self { device, queue: NO_QUEUE, len_bytes: 0, address: 0, data: 0 }
    }

    /// It as bytes.
    pub fn to_bytes(self) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        put(&mut bytes, 0, &self.device.to_ne_bytes());
        put(&mut bytes, 4, &self.queue.to_ne_bytes());
        put(&mut bytes, 6, &self.len_bytes.to_ne_bytes());
        put(&mut bytes, 8, &self.address.to_ne_bytes());
        put(&mut bytes, 16, &self.data.to_ne_bytes());
        bytes
    }
}

/// ```text
///   0        2       4       6      8              12       16         20     24
///   | queues | depth | state | pad  | io bytes max | device | process  | pad  | …
///   24         32          40      44      48          64
///   | features | signature | user  | group | reserved  |
/// ```
///
/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// How many queues it has. The kernel makes no more than there are processors.
    pub queues: u16,
    /// How many requests each of them may have.
    pub depth: u16,
    /// What it is about.
    pub state: DeviceState,
    /// The most that a request may move; whole pages.
    pub io_bytes_max: u32,
    /// Its number.
    pub device: u32,
    /// The process that serves it; -1 if none does.
    pub process: i32,
    /// What it was made with.
    pub features: Features,
    /// A number that the server has given it, unread by the kernel (`ublksrv_flags`).
    pub signature: u64,
    /// Whose it is.
    pub owner_uid: u32,
    /// Whose it is.
    pub owner_gid: u32,
}

/// What a device is about (`UBLK_S_DEV_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceState {
    /// It has no disk: not yet, or not any more.
    #[default]
    Dead,
    /// Its disk is there, and served.
    Live,
    /// Its disk is there, its server is not: what is asked of it waits.
    Quiesced,
    /// Another state, by its number.
    Other(u16),
}

impl DeviceState {
    const fn of(number: u16) -> Self {
        match number {
            0 => Self::Dead,
            1 => Self::Live,
            2 => Self::Quiesced,
            number => Self::Other(number),
        }
    }

    const fn number(self) -> u16 {
        match self {
            Self::Dead => 0,
            Self::Live => 1,
            Self::Quiesced => 2,
            Self::Other(number) => number,
        }
    }
}

impl DeviceInfo {
    /// How long it is.
    pub const BYTES: usize = 64;

    /// It as bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &self.queues.to_ne_bytes());
        put(&mut bytes, 2, &self.depth.to_ne_bytes());
        put(&mut bytes, 4, &self.state.number().to_ne_bytes());
        put(&mut bytes, 8, &self.io_bytes_max.to_ne_bytes());
        put(&mut bytes, 12, &self.device.to_ne_bytes());
        put(&mut bytes, 16, &self.process.to_ne_bytes());
        put(&mut bytes, 24, &self.features.0.to_ne_bytes());
        put(&mut bytes, 32, &self.signature.to_ne_bytes());
        put(&mut bytes, 40, &self.owner_uid.to_ne_bytes());
        put(&mut bytes, 44, &self.owner_gid.to_ne_bytes());
        bytes
    }

    /// What `bytes` say.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(take(bytes, 0)),
            depth: u16::from_ne_bytes(take(bytes, 2)),
            state: DeviceState::of(u16::from_ne_bytes(take(bytes, 4))),
            io_bytes_max: u32::from_ne_bytes(take(bytes, 8)),
            device: u32::from_ne_bytes(take(bytes, 12)),
            process: i32::from_ne_bytes(take(bytes, 16)),
            features: Features(u64::from_ne_bytes(take(bytes, 24))),
            signature: u64::from_ne_bytes(take(bytes, 32)),
            owner_uid: u32::from_ne_bytes(take(bytes, 40)),
            owner_gid: u32::from_ne_bytes(take(bytes, 44)),
        }
    }
}

/// What a kernel can do, and what a device was made with (`UBLK_F_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// The data of requests can be lent to a ring as buffers of it (Linux 6.15).
    pub const ZERO_COPY: Self = Self(1 << 0);
    /// When its server dies, the disk waits for another (Linux 6.1).
    pub const RECOVERY: Self = Self(1 << 3);
    /// The same, and what the server had not answered is asked again.
    pub const RECOVERY_REISSUE: Self = Self(1 << 4);
    /// Commands are numbered as `ioctl`s are (Linux 6.4).
    pub const IOCTL_ENCODE: Self = Self(1 << 6);
    /// The data of requests are read and written by way of `/dev/ublkcN` (Linux 6.5).
    pub const USER_COPY: Self = Self(1 << 7);

    /// Any thread may have them lent, and taken back (Linux 6.17).
    pub const LENT_TO_ANY_THREAD: Self = Self(1 << 14);

    const NAMES: [(Self, &'static str); 6] = [
        (Self::ZERO_COPY, "zero copy"),
        (Self::RECOVERY, "recovery"),
        (Self::RECOVERY_REISSUE, "recovery with reissue"),
        (Self::IOCTL_ENCODE, "commands numbered as ioctls"),
        (Self::USER_COPY, "user copy"),
        (Self::LENT_TO_ANY_THREAD, "zero copy by any thread"),
    ];

    /// Both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are in it.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// It without `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The names of those that this crate knows.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(one, _)| self.has(*one)).map(|(_, name)| name)
    }
}
