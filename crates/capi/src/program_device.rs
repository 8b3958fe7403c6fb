//! Block device that the program implements as a table of functions, for a server.
//!
//! ```text
//!   IoChannel::submit ─> slot: token of the request, its segments as addresses ─> submit of the program
//!   IoChannel::poll  <─ token of the request <─ slot, if it is in flight <─────── poll of the program
//! ```

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment, WakeSource,
};
use tenmil_dma::RegionTable;

use crate::c_string::SizedStruct;
use crate::device::{TENMIL_DURABILITY_NONE, TENMIL_DURABILITY_PERSISTENT};
use crate::failure::Failure;
use crate::io::{Completion, Io, IoSegment, TENMIL_IO_DEALLOCATE, TENMIL_IO_FUA, data_copies};

/// Properties of a device that the program implements. Set all bytes to zero and `size` to sizeof of the
/// structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceProperties {
    /// Size of this structure in bytes.
    pub size: u32,
    /// Bytes of a block: 512 or 4096.
    pub block_size: u32,
    /// Number of blocks.
    pub block_count: u64,
    /// Blocks of the largest request; zero means 256. Larger ones are split.
    pub request_blocks_max: u32,
    /// Segments of the largest request; zero means 1. Requests with more are split or copied.
    pub segments_max: u32,
    /// Largest number of requests in flight of a channel; zero means 64.
    pub depth_max: u32,
    /// Operations that the device has: bit `1 << TENMIL_OP_...` of each. Some others are emulated.
    pub operations: u32,
    /// TENMIL_DURABILITY_...
    pub durability: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<DeviceProperties>() == 40);

// SAFETY: integers in the layout of C, the first of which is the size.
unsafe impl SizedStruct for DeviceProperties {
    const FIRST_SIZE: usize = 40;
}

/// Functions of a device that the program implements. A server calls those of one channel by one thread at a
/// time; none may block, and none may call a function of this library other than those for texts.
///
/// The structure is copied. `device` and the channels belong to the program, and stay valid until the server
/// has been stopped.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceFunctions {
    /// Opens a channel of `device`, for one thread, and stores what the other functions get in `*channel`.
    /// Returns zero, or another number if that fails. Called by any thread.
    pub open_channel: Option<unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> i32>,
    /// Closes a channel. Requests in flight are abandoned: when it returns, their memory is not accessed any
    /// more, and they are not completed. Called by any thread.
    pub close_channel: Option<unsafe extern "C" fn(*mut c_void)>,
    /// Accepts requests from the front, and returns how many: fewer if the channel is full. If the result is
    /// negative, none was accepted and all of them fail. The memory of a request is in its `segments`, also if
    /// it is one piece, which `data` has as well; memory and segments stay valid until the completion. Tokens
    /// are less than `depth_max`.
    pub submit: Option<unsafe extern "C" fn(*mut c_void, *const Io, u32) -> i32>,
    /// Writes up to the given number of completions, of any requests in flight, and returns their number. Sets
    /// token, status and result of each. A token that is not in flight is ignored.
    pub poll: Option<unsafe extern "C" fn(*mut c_void, *mut Completion, u32) -> i32>,
    /// Returns a descriptor that is readable while the channel has completions, so that the server may sleep,
    /// or -1. NULL: the server polls while requests are in flight. It is valid until the channel is closed.
    pub event_fd: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
}

/// The functions of a device, all of which exist except the last.
#[derive(Clone, Copy)]
struct CheckedFunctions {
    open_channel: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> i32,
    close_channel: unsafe extern "C" fn(*mut c_void),
    submit: unsafe extern "C" fn(*mut c_void, *const Io, u32) -> i32,
    poll: unsafe extern "C" fn(*mut c_void, *mut Completion, u32) -> i32,
    event_fd: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
}

/// A pointer of the program that its functions get back.
#[derive(Clone, Copy)]
struct ProgramPointer(*mut c_void);

// SAFETY: the library never dereferences it. The functions that get it are called by one thread at a time or by
// any, as `DeviceFunctions` describes for each, and the program implements them so.
unsafe impl Send for ProgramPointer {}
// SAFETY: as above.
unsafe impl Sync for ProgramPointer {}

/// Device of the program.
pub(crate) struct ProgramDevice {
    name: String,
    functions: CheckedFunctions,
    device: ProgramPointer,
    limits: Limits,
    regions: RegionTable,
    /// Completions with a token that was not in flight.
    violations: Arc<AtomicU64>,
}

/// Channel of one thread to it.
struct ProgramChannel {
    functions: CheckedFunctions,
    channel: ProgramPointer,
    event_fd: Option<RawFd>,
    limits: Limits,
    regions: RegionTable,
    slots: Box<[RequestSlot]>,
    free: Vec<u32>,
    /// Requests of a batch.
    ios: Vec<Io>,
    completions: Vec<Completion>,
    /// Completions of requests that the program did not accept.
    refused: Vec<IoCompletion>,
    violations: Arc<AtomicU64>,
}

/// Request in flight.
struct RequestSlot {
    token: u64,
    is_in_flight: bool,
    /// The memory of the request; the array keeps its address.
    segments: Box<[IoSegment]>,
}

// SAFETY: the addresses in the slots and requests are of memory that lives until the completion of their request,
// on any thread; they are passed to the program only.
unsafe impl Send for ProgramChannel {}

/// Limits of what a program may ask for.
const DEPTH_MAX: u32 = 4096;
const SEGMENTS_MAX: u32 = 512;

impl ProgramDevice {
    /// Checks the properties and functions of a device.
    ///
    /// # Safety
    ///
    /// Until all channels are closed, the functions may be called with `device` as [`DeviceFunctions`]
    /// describes.
    pub(crate) unsafe fn new(
        name: &str,
        properties: &DeviceProperties,
        functions: &DeviceFunctions,
        device: *mut c_void,
        regions: &RegionTable,
    ) -> Result<Self, Failure> {
        let limits = limits_of(name, properties)?;
        let missing = |function: &str| {
            Failure::usage(format_args!("{name}: {function} is NULL, expected a function"))
        };
        let functions = CheckedFunctions {
            open_channel: functions.open_channel.ok_or_else(|| missing("open_channel"))?,
            close_channel: functions.close_channel.ok_or_else(|| missing("close_channel"))?,
            submit: functions.submit.ok_or_else(|| missing("submit"))?,
            poll: functions.poll.ok_or_else(|| missing("poll"))?,
            event_fd: functions.event_fd,
        };
        Ok(Self {
            name: name.to_owned(),
            functions,
            device: ProgramPointer(device),
            limits,
            regions: regions.clone(),
            violations: Arc::default(),
        })
    }

    /// Whether the program may change blocks.
    pub(crate) fn is_writable(&self) -> bool {
        self.limits.operations.has(Operation::Write)
    }
}

fn limits_of(name: &str, properties: &DeviceProperties) -> Result<Limits, Failure> {
    let usage = |text: String| Failure::usage(format_args!("{name}: {text}"));
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let DeviceProperties { block_size, block_count, operations, durability, .. } = *properties;
    let (depth_max, segments_max) = (or(properties.depth_max, 64), or(properties.segments_max, 1));
    if ![512, 4096].contains(&block_size) || block_count == 0 {
        return Err(usage(format!(
            "{block_count} blocks of {block_size} bytes, expected at least 1 of 512 or 4096"
        )));
    }
    if depth_max > DEPTH_MAX || segments_max > SEGMENTS_MAX {
        return Err(usage(format!(
            "depth_max is {depth_max} and segments_max {segments_max}, expected at most {DEPTH_MAX} \
             and {SEGMENTS_MAX}"
        )));
    }
    if durability > TENMIL_DURABILITY_NONE || operations >> Operation::ALL.len() != 0 {
        return Err(usage(format!(
            "durability is {durability} and operations {operations:#x}, expected \
             TENMIL_DURABILITY_… and bits of TENMIL_OP_…"
        )));
    }
    let has = |operation: &Operation| operations & (1 << *operation as u32) != 0;
    let supported = Operation::ALL.iter().filter(|operation| has(operation));
    let supported = supported.fold(OperationSet::default(), |set, one| set.with(*one));
    if !supported.has(Operation::Read) {
        return Err(usage(format!("operations is {operations:#x}, expected reads at least")));
    }
    Ok(Limits {
        block_size,
        metadata_size: 0,
        block_count,
        request_blocks_max: or(properties.request_blocks_max, 256),
        segments_max: u16::try_from(segments_max).unwrap_or(1),
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max,
        durability: match durability {
            TENMIL_DURABILITY_PERSISTENT => Durability::Persistent,
            TENMIL_DURABILITY_NONE => Durability::NonPersistent,
            _ => Durability::VolatileCache,
        },
        operations: supported,
    })
}

impl BlockDevice for ProgramDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let mut channel = null_mut();
        // SAFETY: the program has promised that the function may be called with its device, and the pointer
        // may be written.
        let code = unsafe { (self.functions.open_channel)(self.device.0, &raw mut channel) };
        if code != 0 {
            let name = &self.name;
            return Err(Error::environment(format!(
                "{name}: open_channel of the program returned {code}, expected 0"
            )));
        }
        // SAFETY: the channel has been opened, and the program promises the descriptor until it is closed.
        let event_fd = self.functions.event_fd.map(|event_fd| unsafe { event_fd(channel) });
        let depth = self.limits.depth_max;
        let slot = || RequestSlot {
            token: 0,
            is_in_flight: false,
            segments: vec![
                IoSegment { data: null_mut(), len: 0 };
                usize::from(self.limits.segments_max)
            ]
            .into(),
        };
        Ok(Box::new(ProgramChannel {
            functions: self.functions,
            channel: ProgramPointer(channel),
            event_fd: event_fd.filter(|fd| *fd >= 0),
            limits: self.limits.clone(),
            regions: self.regions.clone(),
            slots: (0..depth).map(|_| slot()).collect(),
            free: (0..depth).rev().collect(),
            ios: Vec::with_capacity(depth as usize),
            completions: Vec::with_capacity(depth as usize),
            refused: Vec::with_capacity(depth as usize),
            violations: Arc::clone(&self.violations),
        }))
    }

    fn failure_reason(&self) -> Option<String> {
        let count = self.violations.load(Ordering::Relaxed);
        (count > 0).then(|| {
            format!(
                "{}: the program has completed {count} requests that were not in flight",
                self.name
            )
        })
    }
}

impl ProgramChannel {
    /// Fills a slot with a request, or returns why it is invalid.
    fn prepare(&mut self, request: &Request, segments: &[Segment]) -> Result<(), IoStatus> {
        let end = request.lba.checked_add(request.blocks.into());
        if request.operation != Operation::Flush
            && end.is_none_or(|end| end > self.limits.block_count)
        {
            return Err(IoStatus::LBA_OUT_OF_RANGE);
        }
        let Some(&number) = self.free.last() else { return Err(IoStatus::INTERNAL_ERROR) };
        let slot = &mut self.slots[number as usize];
        let first = request.segment_first as usize;
        let memory = segments.get(first..first + usize::from(request.segment_count));
        let memory = memory.ok_or(IoStatus::DATA_TRANSFER_ERROR)?;
        if memory.len() > slot.segments.len() {
            return Err(IoStatus::INVALID_FIELD);
        }
        let mut sum = 0;
        for (segment, into) in memory.iter().zip(&mut slot.segments) {
            let address = self.regions.host_address(*segment);
            let address = address.map_err(|_| IoStatus::DATA_TRANSFER_ERROR)?;
            *into = IoSegment { data: address.as_ptr().cast(), len: segment.len_bytes.into() };
            sum += u64::from(segment.len_bytes);
        }
        let blocks = u64::from(request.blocks) * u64::from(self.limits.block_size);
        if sum != blocks * data_copies(request.operation) {
            return Err(IoStatus::DATA_TRANSFER_ERROR);
        }
        (slot.token, slot.is_in_flight) = (request.token, true);
        self.ios.push(Io {
            token: number.into(),
            lba: request.lba,
            source_lba: request.operand,
            data: if memory.len() == 1 { slot.segments[0].data } else { null_mut() },
            segments: slot.segments.as_ptr(),
            blocks: request.blocks,
            segment_count: request.segment_count,
            operation: request.operation as u8,
            flags: request.flags.0 & (TENMIL_IO_FUA | TENMIL_IO_DEALLOCATE),
        });
        self.free.pop();
        Ok(())
    }

    /// Frees a slot, and returns the token of its request.
    fn release(&mut self, number: u64) -> Option<u64> {
        let slot = usize::try_from(number).ok().and_then(|number| self.slots.get_mut(number));
        let slot = slot.filter(|slot| slot.is_in_flight)?;
        slot.is_in_flight = false;
        let token = slot.token;
        self.free.extend(u32::try_from(number));
        Some(token)
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl IoChannel for ProgramChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.ios.clear();
        let room = self.free.len().saturating_sub(self.refused.len());
        let mut count = 0;
        let mut invalid = None;
        for request in requests.iter().take(room) {
            if let Err(status) = self.prepare(request, segments) {
                invalid = Some(IoCompletion { token: request.token, status, result: 0 });
                break;
            }
            count += 1;
        }
        let given = u32::try_from(count).unwrap_or(u32::MAX);
        let taken = if count == 0 {
            0
        } else {
            // SAFETY: the channel is open, the array has as many requests, and their segments and memory stay
            // valid until they complete.
            unsafe { (self.functions.submit)(self.channel.0, self.ios.as_ptr(), given) }
        };
        let accepted = usize::try_from(taken).unwrap_or(0).min(count);
        // In reverse, so that slots are reused in the same order.
        for number in (accepted..count).rev() {
            let slot = self.ios[number].token;
            let Some(token) = self.release(slot) else { continue };
            if taken < 0 {
                let status = IoStatus::INTERNAL_ERROR;
                self.refused.push(IoCompletion { token, status, result: 0 });
            }
        }
        if taken < 0 {
            return count;
        }
        // An invalid request completes with its status after those before it were accepted.
        let is_next = accepted == count && invalid.is_some();
        self.refused.extend(invalid.filter(|_| is_next));
        accepted + usize::from(is_next)
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let mut count = self.refused.len().min(completions.remaining());
        self.refused.drain(..count).for_each(|completion| completions.push(completion));
        let room = completions.remaining().min(self.in_flight());
        if room == 0 {
            return count;
        }
        let unused = Completion { token: u64::MAX, result: 0, status: 0, status_class: 0 };
        self.completions.clear();
        self.completions.resize(room, unused);
        let most = u32::try_from(room).unwrap_or(u32::MAX);
        let array = self.completions.as_mut_ptr();
        // SAFETY: the channel is open, and the array has room for as many completions.
        let found = unsafe { (self.functions.poll)(self.channel.0, array, most) };
        for index in 0..usize::try_from(found).unwrap_or(0).min(room) {
            let Completion { token, status, result, .. } = self.completions[index];
            let Some(token) = self.release(token) else {
                self.violations.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            completions.push(IoCompletion { token, status: IoStatus(status & 0x7fff), result });
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for ProgramChannel {
    fn wake_source(&self) -> WakeSource<'_> {
        match self.event_fd {
            // SAFETY: the program promises that it is valid until the channel is closed.
            Some(fd) => WakeSource::Descriptor(unsafe { BorrowedFd::borrow_raw(fd) }),
            None => WakeSource::None,
        }
    }

    fn wake_at(&self) -> Instant {
        if self.refused.is_empty() { Instant::NEVER } else { Instant::default() }
    }

    fn arm(&mut self) -> bool {
        // The descriptor is readable as long as the program has completions.
        !self.refused.is_empty() || (self.event_fd.is_none() && self.in_flight() > 0)
    }
}

impl Drop for ProgramChannel {
    fn drop(&mut self) {
        // SAFETY: the channel is open, and is not used afterwards.
        unsafe { (self.functions.close_channel)(self.channel.0) };
    }
}
