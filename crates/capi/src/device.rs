//! Devices, opened by URI.

use std::ffi::c_char;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Durability, Error, IoChannel, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{
    AdaptationOptions, AdaptedDevice, Bdev, BdevDescriptor, BdevEvent, BdevOptions,
    BounceBufferAllocator, ChannelMode, Claim, Opener,
};

use crate::c_string::{SizedStruct, copy_string, store, store_sized};
use crate::context::{Context, ContextHandle};
use crate::failure::{Failure, TENMIL_OK, run};
use crate::handles::HandleTable;

/// Open device. A number: copies refer to the same device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceHandle {
    /// Zero is no device.
    pub id: u64,
}

/// The device is opened for reading, beside other readers; files may be write-protected.
pub const TENMIL_OPEN_READ_ONLY: u32 = 1;
/// Queues are those of the driver, which is faster: I/Os that the driver does not have are refused instead of
/// being split or emulated, and there are no events. The I/Os must lie within `request_blocks_max`,
/// `segments_max` and `block_count` of struct tenmil_device_info. Not together with TENMIL_OPEN_READ_ONLY.
pub const TENMIL_OPEN_DIRECT: u32 = 2;

/// Completed writes are on stable media.
pub const TENMIL_DURABILITY_PERSISTENT: u32 = 0;
/// Completed writes are in a volatile cache until a flush.
pub const TENMIL_DURABILITY_VOLATILE_CACHE: u32 = 1;
/// Nothing survives the end of the process: the medium is memory.
pub const TENMIL_DURABILITY_NONE: u32 = 2;

/// Geometry and limits of a device. Set `size` to sizeof of the structure before the call; a program that
/// was built with a newer header finds zero in fields that the library does not know.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceInfo {
    /// Size of this structure in bytes.
    pub size: u32,
    /// Bytes of a block.
    pub block_size: u32,
    /// Number of blocks. An event TENMIL_EVENT_RESIZED announces a change.
    pub block_count: u64,
    /// Largest depth of a queue.
    pub depth_max: u32,
    /// Largest number of queues at a time.
    pub queues_max: u32,
    /// Largest number of segments of an I/O.
    pub segments_max: u32,
    /// Blocks that are written atomically with respect to power failure.
    pub atomic_write_blocks: u32,
    /// Operations that the device supports, also by emulation: bit `1 << TENMIL_OP_...` of each.
    pub operations: u32,
    /// TENMIL_DURABILITY_...
    pub durability: u32,
    /// Blocks of the largest I/O; larger ones are split, unless the device is open with TENMIL_OPEN_DIRECT.
    pub request_blocks_max: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 48);

// SAFETY: integers in the layout of C, the first of which is the size.
unsafe impl SizedStruct for DeviceInfo {
    const FIRST_SIZE: usize = 48;
}

/// The device has another size; `value` is the number of its blocks.
pub const TENMIL_EVENT_RESIZED: u32 = 1;
/// The device was removed: I/Os in flight complete with an error, and later ones fail. Close it.
pub const TENMIL_EVENT_REMOVED: u32 = 2;
/// The medium has lost the data of `value` blocks from `lba` on.
pub const TENMIL_EVENT_MEDIUM_ERROR: u32 = 3;
/// The device was replaced, or its contents have changed.
pub const TENMIL_EVENT_MEDIUM_CHANGED: u32 = 4;
/// `value` older events were dropped, because they were not fetched.
pub const TENMIL_EVENT_OVERFLOWED: u32 = 5;

/// Event of a device. Set `size` to sizeof of the structure before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceEvent {
    /// Size of this structure in bytes.
    pub size: u32,
    /// TENMIL_EVENT_...
    pub kind: u32,
    /// First block.
    pub lba: u64,
    /// Number of blocks or events.
    pub value: u64,
}

const _: () = assert!(size_of::<DeviceEvent>() == 24);

// SAFETY: integers in the layout of C, the first of which is the size.
unsafe impl SizedStruct for DeviceEvent {
    const FIRST_SIZE: usize = 24;
}

/// An open device. Fields in the order in which they are dropped.
pub(crate) struct Device {
    adapted: AdaptedDevice,
    descriptor: Arc<BdevDescriptor>,
    pub(crate) name: String,
    /// Channels are those of the driver.
    pub(crate) is_direct: bool,
    pub(crate) context: Arc<Context>,
}

static DEVICES: HandleTable<Device> = HandleTable::new("device");

/// Bounce buffers of a queue, for emulated operations.
const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u16 = 4;

impl DeviceHandle {
    pub(crate) fn get(self) -> Result<Arc<Device>, Failure> {
        DEVICES.get(self.id)
    }
}

impl Device {
    /// Opens a device. Blocks.
    fn open(context: Arc<Context>, uri: &str, flags: u32) -> Result<Self, Failure> {
        let is_direct = flags & TENMIL_OPEN_DIRECT != 0;
        let is_read_only = flags & TENMIL_OPEN_READ_ONLY != 0;
        let parsed = uri.parse::<Uri>().map_err(|why| Error::from(why).with_context("open"))?;
        let name = parsed.to_string();
        let refuse = |why: Error| {
            let text = why.text.strip_prefix(&format!("{name}: ")).unwrap_or(&why.text);
            Error { text: format!("open {name}: {text}"), ..why.clone() }
        };
        let parsed = if is_read_only { parsed.read_only() } else { parsed };
        let (regions, clock) = (&context.regions, context.clock);
        let opener = Opener { regions, clock, seed: 1, kinds: tenmil::KINDS };
        // A refused opening leaves no file behind that it has created.
        let opened = tenmil_linux::storage_file::create_files_if_ok(|| opener.open(&parsed))
            .map_err(refuse)?;
        let options = BdevOptions {
            // Latencies are measured by the program, which has the time of its submissions.
            timing: false,
            mode: if is_direct { ChannelMode::Bypass } else { ChannelMode::Mq },
            ..BdevOptions::new(clock, tenmil_linux::random_seed())
        };
        let device = Bdev::new(&name, opened.medium, options).map_err(refuse)?;
        let claim = if is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = device.open(claim, "the program");
        let descriptor = descriptor
            .map_err(|why| refuse(Error::new(why.category(), why.to_string())))
            .map(Arc::new)?;
        let chunk_bytes = CHUNK_BYTES.max(descriptor.limits().block_size.next_power_of_two());
        let memory = BounceBufferAllocator::new(regions, chunk_bytes, CHUNKS).map_err(refuse)?;
        let (shared, options) = (Arc::clone(&descriptor), AdaptationOptions::default());
        let adapted = AdaptedDevice::new(&device, shared, memory, options).map_err(refuse)?;
        Ok(Self { adapted, descriptor, name, is_direct, context })
    }

    /// Limits, with the current size.
    pub(crate) fn limits(&self) -> Limits {
        if self.is_direct { self.descriptor.limits() } else { self.adapted.limits() }
    }

    /// Opens a channel of it.
    pub(crate) fn channel(&self) -> Result<Box<dyn IoChannel>, Failure> {
        let channel =
            if self.is_direct { self.descriptor.channel() } else { self.adapted.channel() };
        Ok(channel.map_err(|why| why.with_context(format!("{}: create a queue", self.name)))?)
    }

    fn info(&self) -> DeviceInfo {
        let limits = self.limits();
        DeviceInfo {
            size: 0,
            block_size: limits.block_size,
            block_count: limits.block_count,
            depth_max: limits.depth_max.min(crate::queue::DEPTH_MAX),
            queues_max: self.adapted.channels_max(),
            segments_max: limits.segments_max.into(),
            atomic_write_blocks: limits.atomic_write_blocks,
            operations: limits.operations.bits().into(),
            durability: match limits.durability {
                Durability::Persistent => TENMIL_DURABILITY_PERSISTENT,
                Durability::VolatileCache => TENMIL_DURABILITY_VOLATILE_CACHE,
                Durability::NonPersistent => TENMIL_DURABILITY_NONE,
            },
            request_blocks_max: limits.request_blocks_max,
            reserved: 0,
        }
    }
}

/// Opens the device that `uri` names, such as "file:/var/tmp/disk?size=1g", "tcp://HOST:PORT/NQN?ns=1",
/// "pcie:0000:5e:00.0" or "emu:ram", and stores it in `*device`. Flags are TENMIL_OPEN_... or zero. Blocks
/// until the device is open, or cannot be opened within its timeouts.
///
/// Each call opens the device anew: to use one from several threads, create several queues. A device that is
/// open for writing excludes other writers where it can (files and block devices are locked).
///
/// The device belongs to the caller, which closes it by tenmil_close(). The string is read during the call
/// only.
///
/// # Safety
///
/// `uri` is NULL or a string; `device` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_open(
    context: ContextHandle,
    uri: *const c_char,
    flags: u32,
    device: *mut DeviceHandle,
) -> i32 {
    run("tenmil_open", || {
        // SAFETY: the caller promises that it may be written. Nothing is opened without a place for it.
        unsafe { store("device", device, DeviceHandle { id: 0 }) }?;
        // SAFETY: the caller promises that it is NULL or a string.
        let uri = unsafe { copy_string("uri", uri) }?;
        if ![0, TENMIL_OPEN_READ_ONLY, TENMIL_OPEN_DIRECT].contains(&flags) {
            return Err(Failure::usage(format_args!(
                "open {uri}: flags are {flags:#x}, expected 0, TENMIL_OPEN_READ_ONLY or \
                 TENMIL_OPEN_DIRECT"
            )));
        }
        let opened = Device::open(context.get()?, &uri, flags)?;
        let id = DEVICES.add(Arc::new(opened));
        // SAFETY: as above.
        unsafe { store("device", device, DeviceHandle { id }) }?;
        Ok(TENMIL_OK)
    })
}

/// Closes a device. TENMIL_ERROR_BUSY while one of its queues is open. Blocks until files are closed and
/// controllers are shut down. Data in a volatile cache are not flushed: submit a flush before.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_close(device: DeviceHandle) -> i32 {
    run("tenmil_close", || DEVICES.remove_unused(device.id, "queues").map(|_| TENMIL_OK))
}

/// Stores geometry and limits of a device in `*info`, which belongs to the caller. Set `info->size` before.
///
/// # Safety
///
/// `info` is NULL or as long as its field `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_device_get_info(
    device: DeviceHandle,
    info: *mut DeviceInfo,
) -> i32 {
    run("tenmil_device_get_info", || {
        let found = device.get()?.info();
        // SAFETY: the caller promises the same of the structure.
        unsafe { store_sized("info", info, &found) }?;
        Ok(TENMIL_OK)
    })
}

/// Stores a descriptor in `*fd` that is readable while events of the device are pending.
///
/// The descriptor belongs to the library: wait for it by poll() or epoll, and neither read nor close it. It
/// is valid until the device is closed.
///
/// # Safety
///
/// `fd` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_device_event_fd(device: DeviceHandle, fd: *mut i32) -> i32 {
    run("tenmil_device_event_fd", || {
        let device = device.get()?;
        let Some(descriptor) = device.descriptor.event_fd() else {
            let text = format!("{}: this process has no more file descriptors", device.name);
            return Err(Error::environment(text).into());
        };
        // SAFETY: the caller promises the same.
        unsafe { store("fd", fd, descriptor.as_raw_fd()) }?;
        Ok(TENMIL_OK)
    })
}

/// Fetches the oldest pending event of a device into `*event`, which belongs to the caller. Returns 1, or 0
/// if none is pending. Set `event->size` before.
///
/// # Safety
///
/// `event` is NULL or as long as its field `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_device_next_event(
    device: DeviceHandle,
    event: *mut DeviceEvent,
) -> i32 {
    run("tenmil_device_next_event", || {
        let device = device.get()?;
        // SAFETY: the caller promises the same of the structure. Nothing is fetched if it is invalid.
        unsafe { store_sized("event", event, &DeviceEvent::default()) }?;
        let Some(found) = device.descriptor.next_event() else { return Ok(0) };
        // SAFETY: as above.
        unsafe { store_sized("event", event, &event_of(&found)) }?;
        Ok(1)
    })
}

/// Reads the size of the device again: if it was extended elsewhere, all its queues have the new size from
/// their next poll on, and an event TENMIL_EVENT_RESIZED announces it. Blocks.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_device_refresh(device: DeviceHandle) -> i32 {
    run("tenmil_device_refresh", || {
        let device = device.get()?;
        let refuse = |why: Error| why.with_context(format!("{}: read the size", device.name));
        device.descriptor.refresh_size().map_err(refuse)?;
        Ok(TENMIL_OK)
    })
}

fn event_of(event: &BdevEvent) -> DeviceEvent {
    let (kind, lba, value) = match *event {
        BdevEvent::Resized { block_count } => (TENMIL_EVENT_RESIZED, 0, block_count),
        BdevEvent::Removed => (TENMIL_EVENT_REMOVED, 0, 0),
        BdevEvent::MediumError { lba, blocks } => (TENMIL_EVENT_MEDIUM_ERROR, lba, blocks),
        BdevEvent::MediumChanged => (TENMIL_EVENT_MEDIUM_CHANGED, 0, 0),
        BdevEvent::Overflowed { lost } => (TENMIL_EVENT_OVERFLOWED, 0, lost),
    };
    DeviceEvent { size: 0, kind, lba, value }
}
