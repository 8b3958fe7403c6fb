//! Commands to `/dev/ublk-control`, and the description of a device.

use super::{READ, READ_WRITE, bytes_at, ioctl_code, put_bytes};

/// ```text
///   0        4       6       8         16      24         26    28         32
///   | device | queue | bytes | address | data  | path len |     | reserved |
/// ```
///
/// `struct ublksrv_ctrl_cmd`, in the command area of a 128-byte submission entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlCommand {
    /// Device number; [`ANY_DEVICE`] lets the kernel select one.
    pub device: u32,
    /// Queue number; [`NO_QUEUE`] if not applicable.
    pub queue: u16,
    /// Length of the payload at `address`.
    pub len_bytes: u16,
    /// Address of the payload, which is input or output.
    pub address: u64,
    /// Additional number of some commands.
    pub data: u64,
}

/// The kernel selects a number (`(__u32)-1`).
pub const ANY_DEVICE: u32 = u32::MAX;
/// No queue (`(__u16)-1`).
pub const NO_QUEUE: u16 = u16::MAX;
/// Length of a command.
pub const COMMAND_BYTES: usize = COMMAND_SIZE as usize;
const COMMAND_SIZE: u16 = 32;

/// Control operation (`UBLK_U_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlOp {
    /// Reads the description of a device: a [`DeviceInfo`].
    GetDeviceInfo,
    /// Creates a device: input and output are a [`DeviceInfo`].
    AddDevice,
    /// Deletes a device, and waits until no process has it open.
    DeleteDevice,
    /// Starts the disk: waits until every request of every queue was fetched. Data: the process
    /// identifier.
    StartDevice,
    /// Stops the disk: waits for requests in progress.
    StopDevice,
    /// Sets the disk parameters: [`Parameters`](super::Parameters).
    SetParameters,
    /// Reads the disk parameters.
    GetParameters,
    /// Starts the recovery of a device whose server has died.
    StartRecovery,
    /// Ends a recovery, once every request was fetched. Data: the process identifier.
    EndRecovery,
    /// Reads the features of the kernel: [`Features`], eight bytes.
    GetFeatures,
    /// Deletes a device without waiting.
    DeleteDeviceAsync,
}

impl ControlOp {
    /// All operations, in numerical order.
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

    /// Operation code.
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
        ioctl_code(direction, COMMAND_SIZE, number)
    }

    /// Action text for error messages.
    pub const fn action_text(self) -> &'static str {
        match self {
            Self::GetDeviceInfo => "ask what it is",
            Self::AddDevice => "make it",
            Self::DeleteDevice | Self::DeleteDeviceAsync => "delete it",
            Self::StartDevice => "show its disk",
            Self::StopDevice => "stop its disk",
            Self::SetParameters => "set the parameters of its disk",
            Self::GetParameters => "get the parameters of its disk",
            Self::StartRecovery => "take it over",
            Self::EndRecovery => "go on with it",
            Self::GetFeatures => "ask what the kernel can do",
        }
    }
}

impl ControlCommand {
    /// Command for `device` without payload.
    pub const fn for_device(device: u32) -> Self {
        Self { device, queue: NO_QUEUE, len_bytes: 0, address: 0, data: 0 }
    }

    /// Encodes to bytes.
    pub fn to_bytes(self) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        put_bytes(&mut bytes, 0, &self.device.to_ne_bytes());
        put_bytes(&mut bytes, 4, &self.queue.to_ne_bytes());
        put_bytes(&mut bytes, 6, &self.len_bytes.to_ne_bytes());
        put_bytes(&mut bytes, 8, &self.address.to_ne_bytes());
        put_bytes(&mut bytes, 16, &self.data.to_ne_bytes());
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
    /// Number of queues. The kernel limits it to the number of CPUs.
    pub queues: u16,
    /// Requests per queue.
    pub depth: u16,
    /// State.
    pub state: DeviceState,
    /// Maximum length of a request; whole pages.
    pub io_bytes_max: u32,
    /// Device number.
    pub device: u32,
    /// Process identifier of the server; -1 if there is none.
    pub process: i32,
    /// Features that the device was created with.
    pub features: Features,
    /// Number assigned by the server, ignored by the kernel (`ublksrv_flags`).
    pub signature: u64,
    /// Owning user.
    pub owner_uid: u32,
    /// Owning group.
    pub owner_gid: u32,
}

/// Device state (`UBLK_S_DEV_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceState {
    /// No disk: not started, or stopped.
    #[default]
    Dead,
    /// The disk is served.
    Live,
    /// The disk exists without a server: requests wait.
    Quiesced,
    /// Another state, by number.
    Other(u16),
}

impl DeviceState {
    const fn from_number(number: u16) -> Self {
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
    /// Length in bytes.
    pub const BYTES: usize = 64;

    /// Encodes to bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put_bytes(&mut bytes, 0, &self.queues.to_ne_bytes());
        put_bytes(&mut bytes, 2, &self.depth.to_ne_bytes());
        put_bytes(&mut bytes, 4, &self.state.number().to_ne_bytes());
        put_bytes(&mut bytes, 8, &self.io_bytes_max.to_ne_bytes());
        put_bytes(&mut bytes, 12, &self.device.to_ne_bytes());
        put_bytes(&mut bytes, 16, &self.process.to_ne_bytes());
        put_bytes(&mut bytes, 24, &self.features.0.to_ne_bytes());
        put_bytes(&mut bytes, 32, &self.signature.to_ne_bytes());
        put_bytes(&mut bytes, 40, &self.owner_uid.to_ne_bytes());
        put_bytes(&mut bytes, 44, &self.owner_gid.to_ne_bytes());
        bytes
    }

    /// Decodes bytes.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(bytes_at(bytes, 0)),
            depth: u16::from_ne_bytes(bytes_at(bytes, 2)),
            state: DeviceState::from_number(u16::from_ne_bytes(bytes_at(bytes, 4))),
            io_bytes_max: u32::from_ne_bytes(bytes_at(bytes, 8)),
            device: u32::from_ne_bytes(bytes_at(bytes, 12)),
            process: i32::from_ne_bytes(bytes_at(bytes, 16)),
            features: Features(u64::from_ne_bytes(bytes_at(bytes, 24))),
            signature: u64::from_ne_bytes(bytes_at(bytes, 32)),
            owner_uid: u32::from_ne_bytes(bytes_at(bytes, 40)),
            owner_gid: u32::from_ne_bytes(bytes_at(bytes, 44)),
        }
    }
}

/// Features of a kernel or a device (`UBLK_F_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// No features.
    pub const NONE: Self = Self(0);
    /// Request data can be registered as buffers of a ring (zero copy, Linux 6.15).
    pub const ZERO_COPY: Self = Self(1 << 0);
    /// After the server's death the disk waits for a new one (Linux 6.1).
    pub const RECOVERY: Self = Self(1 << 3);
    /// As above, and requests that the server had not completed are reissued.
    pub const RECOVERY_REISSUE: Self = Self(1 << 4);
    /// Operation codes are encoded as `ioctl` numbers (Linux 6.4).
    pub const IOCTL_ENCODE: Self = Self(1 << 6);
    /// Request data is read and written through `/dev/ublkcN` (Linux 6.5).
    pub const USER_COPY: Self = Self(1 << 7);

    /// Any thread may register and unregister buffers (Linux 6.17).
    pub const BUFFERS_FROM_ANY_THREAD: Self = Self(1 << 14);

    const NAMES: [(Self, &'static str); 6] = [
        (Self::ZERO_COPY, "zero copy"),
        (Self::RECOVERY, "recovery"),
        (Self::RECOVERY_REISSUE, "recovery with reissue"),
        (Self::IOCTL_ENCODE, "commands numbered as ioctls"),
        (Self::USER_COPY, "user copy"),
        (Self::BUFFERS_FROM_ANY_THREAD, "zero copy by any thread"),
    ];

    /// Union of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are in the set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Difference: the set without `other`.
    #[must_use]
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Names of the known features.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(one, _)| self.has(*one)).map(|(_, name)| name)
    }
}
