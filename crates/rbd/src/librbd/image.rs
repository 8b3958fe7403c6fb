//! An open image: requests, completions, and changes of its header.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fmt, ptr};

use tenmil_base::{Operation, Segment};
use tenmil_dma::RegionTable;
use tenmil_linux::EventFdVectors;

use super::connection::PoolContext;
use super::functions::{
    Completion, ConfigOption, EVENT_TYPE_EVENTFD, Functions, ImageHandle, ImageInfo,
    LOCK_MODE_EXCLUSIVE,
};
use super::io_record::{IoRecord, SubmitError};
use super::{CephErrno, c_string, check, owned_text, text_of};

/// An open image.
///
/// Dropping it closes the image, which blocks until the cluster has answered. No request may be in flight:
/// one that is would never be reported, and its record never freed.
pub(crate) struct Image {
    functions: &'static Functions,
    handle: ImageHandle,
    pool: Arc<PoolContext>,
    /// Resolves the memory of requests, and keeps it mapped.
    regions: RegionTable,
    /// Readable when a request has completed.
    completions: EventFdVectors,
    watch: Option<HeaderWatch>,
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenMode {
    /// To read and write.
    ReadWrite,
    /// To read; a snapshot always.
    ReadOnly,
}

/// Layout of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageLayout {
    /// Size in bytes.
    pub(crate) size_bytes: u64,
    /// Bytes of an object.
    pub(crate) object_bytes: u64,
    /// Bytes that follow each other in one object.
    pub(crate) stripe_unit_bytes: u64,
}

/// Reported by librbd: the header of the image has changed, by a resize or a snapshot.
#[derive(Debug)]
pub(crate) struct HeaderChange {
    has_changed: AtomicBool,
    /// Signaled at each change; it may be that of several images.
    signal: EventFdVectors,
}

struct HeaderWatch {
    /// Number of the watch in librbd.
    number: u64,
    change: ManuallyDrop<Arc<HeaderChange>>,
}

/// `RBD_FEATURE_EXCLUSIVE_LOCK`
const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// Completions taken from librbd by a call.
const POLLED_MAX: c_int = 32;
/// Entries of the list of options that are read at first; a longer list is read again with its length.
const OPTIONS: c_int = 256;
/// Bytes of an image's identifier, with the NUL byte.
const ID_BYTES: usize = 128;

// SAFETY: `rbd_image_t` may be used by any thread: the functions of librbd take its locks themselves. All
// other fields are `Send` and `Sync`.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Opens an image, or a snapshot of it, in a pool. Requests refer to memory of `regions`. Blocks until the
    /// cluster has answered.
    ///
    /// # Errors
    ///
    /// ENOENT if there is no such image or snapshot.
    pub(crate) fn open(
        pool: &Arc<PoolContext>,
        name: &str,
        snapshot: Option<&str>,
        mode: OpenMode,
        regions: &RegionTable,
    ) -> Result<Self, CephErrno> {
        let functions = pool.connection.functions;
        let completions = EventFdVectors::new(1)
            .map_err(|error| CephErrno(error.raw_os_error().unwrap_or(libc::EMFILE)))?;
        let name = c_string(name)?;
        let snapshot = snapshot.map(c_string).transpose()?;
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let open = match mode {
            OpenMode::ReadWrite => functions.rbd_open,
            OpenMode::ReadOnly => functions.rbd_open_read_only,
        };
        let mut handle: ImageHandle = ptr::null_mut();
        // SAFETY: the pool is open; the names are C strings, or null for no snapshot; the handle is stored to
        // a variable that outlives the call.
        check(unsafe { open(pool.handle, name.as_ptr(), &raw mut handle, snapshot) })?;
        let (pool, regions) = (Arc::clone(pool), regions.clone());
        let image = Self { functions, handle, pool, regions, completions, watch: None };
        image.notify_completions()?;
        Ok(image)
    }

    /// The event descriptor that librbd signals at each completion.
    pub(crate) fn completions(&self) -> &EventFdVectors {
        &self.completions
    }

    /// The pool of the image.
    pub(crate) fn pool(&self) -> &PoolContext {
        &self.pool
    }

    fn notify_completions(&self) -> Result<(), CephErrno> {
        let descriptor = self.completions.descriptor(0).ok_or(CephErrno(libc::EBADF))?.as_raw_fd();
        let set = self.functions.rbd_set_image_notification;
        // SAFETY: the image is open, and the descriptor is an eventfd that stays open until the image is
        // closed: `drop` closes the image before the fields are dropped.
        check(unsafe { set(self.handle, descriptor, EVENT_TYPE_EVENTFD) }).map(drop)
    }

    /// Submits a request of `len_bytes` at `offset`, with its data in `segments`. librbd owns the record from then on,
    /// and [`poll`](Self::poll) returns it.
    ///
    /// # Errors
    ///
    /// The record, and why librbd did not start it.
    pub(crate) fn submit(
        &self,
        mut record: Box<IoRecord>,
        operation: Operation,
        offset: u64,
        len_bytes: u64,
        segments: &[Segment],
    ) -> Result<(), (Box<IoRecord>, SubmitError)> {
        let is_transfer = matches!(operation, Operation::Read | Operation::Write);
        if is_transfer && record.set_vectors(&self.regions, segments).is_err() {
            return Err((record, SubmitError::Memory));
        }
        let mut compared = None;
        if operation == Operation::CompareAndWrite {
            let half = usize::try_from(len_bytes).unwrap_or(usize::MAX / 2);
            match record.compared_and_new(&self.regions, segments, half) {
                Ok(addresses) => compared = addresses,
                Err(_) => return Err((record, SubmitError::Memory)),
            }
            if compared.is_none() && record.bounce.len() != half.saturating_mul(2) {
                return Err((record, SubmitError::Refused(CephErrno(libc::EINVAL))));
            }
        }
        let record = Box::into_raw(record);
        let completion = match self.new_completion(record) {
            Ok(completion) => completion,
            Err(errno) => {
                // SAFETY: it was made from a box above, and librbd has no reference to it.
                return Err((unsafe { Box::from_raw(record) }, SubmitError::Refused(errno)));
            }
        };
        let started = match operation {
            Operation::Read | Operation::Write => {
                self.start_transfer(record, operation, offset, completion)
            }
            Operation::CompareAndWrite => {
                self.start_compare_and_write(record, compared, offset, len_bytes, completion)
            }
            _ => self.start_without_data(operation, offset, len_bytes, completion),
        };
        let Err(errno) = started else { return Ok(()) };
        // SAFETY: a call that returns an error has not started the request, so it is not completed, and this
        // is the only reference to its completion.
        unsafe { (self.functions.rbd_aio_release)(completion) };
        // SAFETY: it was made from a box above, and the only reference of librbd was just released.
        Err((unsafe { Box::from_raw(record) }, SubmitError::Refused(errno)))
    }

    /// A completion whose argument is the record. There is no callback: the completion is queued on the image,
    /// and its event descriptor signaled.
    fn new_completion(&self, record: *mut IoRecord) -> Result<Completion, CephErrno> {
        let mut completion: Completion = ptr::null_mut();
        let create = self.functions.rbd_aio_create_completion;
        // SAFETY: the argument is not accessed by librbd without a callback; the completion is stored to a
        // variable that outlives the call.
        check(unsafe { create(record.cast(), None, &raw mut completion) })?;
        Ok(completion)
    }

    fn start_transfer(
        &self,
        record: *mut IoRecord,
        operation: Operation,
        offset: u64,
        completion: Completion,
    ) -> Result<(), CephErrno> {
        // SAFETY: the record was made from a box, and librbd does not refer to it before the calls below.
        let vectors = unsafe { &(*record).vectors };
        let (list, count) = (vectors.as_ptr(), vectors.len());
        let first = vectors.first().map(|first| (first.iov_base.cast::<c_char>(), first.iov_len));
        let functions = self.functions;
        let count = c_int::try_from(count).map_err(|_| CephErrno(libc::EINVAL))?;
        let returned = match (operation, first) {
            (Operation::Read, Some((address, len))) if count == 1 => {
                // SAFETY: the address was resolved by the region table, which keeps the memory mapped as long as
                // the image exists; no reference into a region exists.
                unsafe { (functions.rbd_aio_read)(self.handle, offset, len, address, completion) }
            }
            (_, Some((address, len))) if count == 1 => {
                // SAFETY: as above; librbd only reads the memory.
                unsafe { (functions.rbd_aio_write)(self.handle, offset, len, address, completion) }
            }
            (Operation::Read, _) => {
                // SAFETY: each address was resolved by the region table, as above. The list belongs to the
                // record, which is neither changed nor freed before the completion is polled.
                unsafe { (functions.rbd_aio_readv)(self.handle, list, count, offset, completion) }
            }
            _ => {
                // SAFETY: as above; librbd only reads the memory.
                unsafe { (functions.rbd_aio_writev)(self.handle, list, count, offset, completion) }
            }
        };
        check(returned).map(drop)
    }

    fn start_compare_and_write(
        &self,
        record: *mut IoRecord,
        addresses: Option<[*const c_char; 2]>,
        offset: u64,
        len_bytes: u64,
        completion: Completion,
    ) -> Result<(), CephErrno> {
        let len = usize::try_from(len_bytes).map_err(|_| CephErrno(libc::EINVAL))?;
        // SAFETY: the record was made from a box, and librbd does not refer to it before the call below.
        let bounce = unsafe { (*record).bounce.as_ptr() }.cast::<c_char>();
        let [compared, new] = addresses.unwrap_or([bounce, bounce.wrapping_add(len)]);
        // SAFETY: the record is a valid allocation; this forms no reference.
        let mismatch = unsafe { &raw mut (*record).mismatch };
        let start = self.functions.rbd_aio_compare_and_write;
        // SAFETY: both addresses have `len` bytes, in a region as in `start_transfer`, or in the bounce buffer of
        // the record, whose length `submit` has checked; the word is in the record. The record is neither
        // changed nor freed before the completion is polled.
        let returned =
            unsafe { start(self.handle, offset, len, compared, new, completion, mismatch, 0) };
        check(c_int::try_from(returned).unwrap_or(0)).map(drop)
    }

    fn start_without_data(
        &self,
        operation: Operation,
        offset: u64,
        len_bytes: u64,
        completion: Completion,
    ) -> Result<(), CephErrno> {
        let functions = self.functions;
        let returned = match operation {
            Operation::Flush => {
                // SAFETY: the image is open, and the completion is new.
                unsafe { (functions.rbd_aio_flush)(self.handle, completion) }
            }
            Operation::Deallocate => {
                // SAFETY: as above.
                unsafe { (functions.rbd_aio_discard)(self.handle, offset, len_bytes, completion) }
            }
            Operation::WriteZeroes => {
                let len = usize::try_from(len_bytes).map_err(|_| CephErrno(libc::EINVAL))?;
                let start = functions.rbd_aio_write_zeroes;
                // SAFETY: as above.
                unsafe { start(self.handle, offset, len, completion, 0, 0) }
            }
            _ => return Err(CephErrno(libc::EOPNOTSUPP)),
        };
        check(returned).map(drop)
    }

    /// Appends the records of completed requests to `completed`, each with its result. Takes what a call of librbd
    /// returns, at most [`POLLED_MAX`], and returns the number.
    #[expect(clippy::vec_box, reason = "librbd has the addresses of records")]
    pub(crate) fn poll(&self, completed: &mut Vec<Box<IoRecord>>) -> usize {
        let mut found: [Completion; POLLED_MAX as usize] = [ptr::null_mut(); _];
        let poll = self.functions.rbd_poll_io_events;
        // SAFETY: the image is open, and the array has the length that is passed with it.
        let count = unsafe { poll(self.handle, found.as_mut_ptr(), POLLED_MAX) };
        let count = usize::try_from(count).unwrap_or(0).min(found.len());
        completed.extend(found[..count].iter().map(|completion| self.finish(*completion)));
        count
    }

    /// The record of a completed request, with its result.
    fn finish(&self, completion: Completion) -> Box<IoRecord> {
        // SAFETY: librbd has completed it and returned it once, so it is valid until its release below.
        let record = unsafe { (self.functions.rbd_aio_get_arg)(completion) };
        // SAFETY: as above.
        let result = unsafe { (self.functions.rbd_aio_get_return_value)(completion) };
        // SAFETY: as above; it is not used any more.
        unsafe { (self.functions.rbd_aio_release)(completion) };
        // SAFETY: the argument of every completion of an image is a record made from a box by `submit`, and
        // librbd returns a completion once.
        let mut record = unsafe { Box::from_raw(record.cast::<IoRecord>()) };
        record.result = result as i64;
        record
    }

    /// Size and layout. May block while the cluster does not answer.
    ///
    /// # Errors
    ///
    /// ESHUTDOWN if this client was blocklisted, ENOENT if the image was deleted.
    pub(crate) fn layout(&self) -> Result<ImageLayout, CephErrno> {
        // SAFETY: all zeroes is a valid value of this plain structure.
        let mut info: ImageInfo = unsafe { std::mem::zeroed() };
        let stat = self.functions.rbd_stat;
        // SAFETY: the image is open, and the structure has the size that is passed with it.
        check(unsafe { stat(self.handle, &raw mut info, size_of::<ImageInfo>()) })?;
        let stripe_unit_bytes = self.read_u64(self.functions.rbd_get_stripe_unit)?;
        let ImageInfo { size: size_bytes, object_size: object_bytes, .. } = info;
        Ok(ImageLayout { size_bytes, object_bytes, stripe_unit_bytes })
    }

    /// Size in bytes. May block while the cluster does not answer.
    pub(crate) fn size_bytes(&self) -> Result<u64, CephErrno> {
        self.read_u64(self.functions.rbd_get_size)
    }

    /// The value of an option of librbd as it applies to this image: its own, that of its pool, or that of the
    /// connection. `None` if librbd does not know it.
    pub(crate) fn option(&self, name: &str) -> Result<Option<String>, CephErrno> {
        let functions = self.functions;
        let nothing = ConfigOption { name: ptr::null_mut(), value: ptr::null_mut(), source: 0 };
        let mut entries = Vec::new();
        let mut count = OPTIONS;
        loop {
            entries.resize(usize::try_from(count).unwrap_or(0), nothing);
            let (list, count) = (entries.as_mut_ptr(), &raw mut count);
            // SAFETY: the image is open, and the list has `count` entries.
            match check(unsafe { (functions.rbd_config_image_list)(self.handle, list, count) }) {
                // The list was longer, and `count` is its length by now.
                Err(CephErrno(libc::ERANGE)) => {}
                Err(errno) => return Err(errno),
                Ok(_) => break,
            }
        }
        let found = &entries[..usize::try_from(count).unwrap_or(0).min(entries.len())];
        let value = found.iter().find(|entry| owned_text(entry.name) == name);
        let value = value.map(|entry| owned_text(entry.value));
        // SAFETY: librbd has filled `count` entries, which are freed once.
        unsafe { (functions.rbd_config_image_list_cleanup)(entries.as_mut_ptr(), count) };
        Ok(value)
    }

    /// Whether the image has an exclusive lock.
    pub(crate) fn has_exclusive_lock(&self) -> Result<bool, CephErrno> {
        Ok(self.read_u64(self.functions.rbd_get_features)? & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// Acquires the exclusive lock and keeps it against requests of other clients. Blocks until the cluster has answered, and while
    /// an owner that does not answer is blocklisted.
    ///
    /// # Errors
    ///
    /// EROFS if another client keeps it.
    pub(crate) fn acquire_lock(&self) -> Result<(), CephErrno> {
        // SAFETY: the image is open.
        check(unsafe { (self.functions.rbd_lock_acquire)(self.handle, LOCK_MODE_EXCLUSIVE) })
            .map(drop)
    }

    /// Whether this client owns the exclusive lock. Asks the cluster, and blocks until it has answered.
    pub(crate) fn owns_lock(&self) -> Result<bool, CephErrno> {
        let mut owns: c_int = 0;
        let query = self.functions.rbd_is_exclusive_lock_owner;
        // SAFETY: the image is open, and the number is stored to a variable that outlives the call.
        check(unsafe { query(self.handle, &raw mut owns) })?;
        Ok(owns != 0)
    }

    /// The identifier of the image, which no other image of its pool has had.
    pub(crate) fn id(&self) -> Result<String, CephErrno> {
        let mut text = [0_u8; ID_BYTES];
        let (address, len) = (text.as_mut_ptr().cast::<c_char>(), text.len());
        // SAFETY: the image is open, and the buffer has the length that is passed with it.
        check(unsafe { (self.functions.rbd_get_id)(self.handle, address, len) })?;
        Ok(text_of(&text))
    }

    /// The identifier of a snapshot.
    pub(crate) fn snapshot_id(&self, name: &str) -> Result<u64, CephErrno> {
        let (name, mut id) = (c_string(name)?, 0);
        let query = self.functions.rbd_snap_get_id;
        // SAFETY: the image is open, the name is a C string, and the number is stored to a variable that
        // outlives the call.
        check(unsafe { query(self.handle, name.as_ptr(), &raw mut id) })?;
        Ok(id)
    }

    /// The allocated extents in `len_bytes` from `offset`, in the order of the image, each with its length; changed since
    /// `since`, a snapshot, if there is one. The second value of an extent is false if it reads as zeroes. Blocks until
    /// the cluster has answered.
    pub(crate) fn allocated_extents(
        &self,
        since: Option<&str>,
        offset: u64,
        len_bytes: u64,
    ) -> Result<Vec<(std::ops::Range<u64>, bool)>, CephErrno> {
        let since = since.map(c_string).transpose()?;
        let since = since.as_ref().map_or(ptr::null(), |since| since.as_ptr());
        let mut extents: Vec<(std::ops::Range<u64>, bool)> = Vec::new();
        let (into, iterate) = ((&raw mut extents).cast(), self.functions.rbd_diff_iterate2);
        // SAFETY: the image is open; the snapshot is a C string or null; the argument is a vector that
        // outlives the call, and which `push_extent` alone accesses meanwhile.
        check(unsafe { iterate(self.handle, since, offset, len_bytes, 1, 0, push_extent, into) })?;
        extents.sort_unstable_by_key(|(range, _)| range.start);
        Ok(extents)
    }

    /// Has changes of the header reported, from now on until the image is closed.
    pub(crate) fn watch_header(&mut self, signal: &EventFdVectors) -> Result<(), CephErrno> {
        let has_changed = AtomicBool::new(false);
        let change = Arc::new(HeaderChange { has_changed, signal: signal.clone() });
        let (mut number, argument) = (0, Arc::as_ptr(&change).cast_mut().cast::<c_void>());
        let watch = self.functions.rbd_update_watch;
        // SAFETY: the image is open. The argument stays valid until `rbd_update_unwatch` has succeeded, after
        // which librbd does not call any more.
        check(unsafe { watch(self.handle, &raw mut number, report_change, argument) })?;
        self.watch = Some(HeaderWatch { number, change: ManuallyDrop::new(change) });
        Ok(())
    }

    /// Whether the header has changed since the last call.
    pub(crate) fn take_header_change(&self) -> bool {
        // Acquire pairs with the release of `report_change`; the header itself is read under librbd's locks.
        let change = self.watch.as_ref().map(|watch| &watch.change.has_changed);
        change.is_some_and(|changed| changed.swap(false, Ordering::Acquire))
    }

    pub(super) fn functions_and_handle(&self) -> (&'static Functions, ImageHandle) {
        (self.functions, self.handle)
    }

    fn read_u64(
        &self,
        read: unsafe extern "C" fn(ImageHandle, *mut u64) -> c_int,
    ) -> Result<u64, CephErrno> {
        let mut value = 0;
        // SAFETY: the image is open, and the number is stored to a variable that outlives the call.
        check(unsafe { read(self.handle, &raw mut value) })?;
        Ok(value)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(mut watch) = self.watch.take() {
            // SAFETY: the image is open, and the number is that of a watch of it.
            let ended = unsafe { (self.functions.rbd_update_unwatch)(self.handle, watch.number) };
            if ended >= 0 {
                // SAFETY: taken once, since the watch is dropped here. librbd does not refer to it any more; if
                // the call fails that is not certain, and it is kept.
                unsafe { ManuallyDrop::drop(&mut watch.change) };
            }
        }
        // SAFETY: the image is open, and the handle is not used after this. An error is of no consequence:
        // the handle is closed in any case.
        unsafe { (self.functions.rbd_close)(self.handle) };
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Image").finish_non_exhaustive()
    }
}

/// Called by a thread of librbd when the header of an image has changed.
unsafe extern "C" fn report_change(argument: *mut c_void) {
    // SAFETY: the argument is that of `watch_header`, which outlives the last call.
    let change = unsafe { &*argument.cast::<HeaderChange>() };
    change.has_changed.store(true, Ordering::Release);
    change.signal.signal(0);
}

/// Called by librbd, during a call of this program, for each extent.
unsafe extern "C" fn push_extent(
    offset: u64,
    len_bytes: usize,
    exists: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: the argument is the vector of `allocated_extents`, which nothing else accesses during its call.
    let extents = unsafe { &mut *argument.cast::<Vec<(std::ops::Range<u64>, bool)>>() };
    if extents.try_reserve(1).is_err() {
        return -libc::ENOMEM;
    }
    extents.push((offset..offset.saturating_add(len_bytes as u64), exists != 0));
    0
}
