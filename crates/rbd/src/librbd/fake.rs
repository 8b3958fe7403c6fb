//! A librbd for tests: images in memory, which complete requests at once or when the test releases them.
//!
//! Images are found by name; each test uses names of its own.

mod object_functions;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libc::iovec;

use super::functions::{
    Completion, ConfigOption, DiffCallback, Functions, ImageHandle, ImageInfo, ImageOptions,
    IoCallback, Ioctx, NamedImage, Rados, SnapshotInfo, UpdateCallback,
};

/// An image of the fake, whether it is open or not.
pub(crate) struct FakeImage {
    state: Mutex<FakeState>,
    /// Error number of every request from now on, or 0.
    pub(crate) errno: AtomicI32,
    /// Number of open handles.
    pub(crate) handles: AtomicUsize,
}

#[derive(Default)]
struct FakeState {
    bytes: Vec<u8>,
    /// Open handles by number.
    open: BTreeMap<usize, HandleState>,
    /// Number of the next handle.
    next: usize,
    /// Number of the handle that owns the lock.
    lock_owner: Option<usize>,
    holds: bool,
    delays_signals: bool,
    /// Options that override those of the client.
    options: Vec<(&'static CStr, &'static CStr)>,
    /// Calls of functions that read or write, by name and number of vectors.
    calls: Vec<(&'static str, usize)>,
}

/// State of an open image.
#[derive(Default)]
struct HandleState {
    /// The descriptor to signal.
    descriptor: c_int,
    /// Completed requests that were not polled.
    completed: Vec<usize>,
    /// Started requests that complete when they are released.
    held: Vec<usize>,
    /// Completions that are not signaled yet.
    unsignaled: usize,
    watch: Option<(UpdateCallback, usize)>,
}

/// What a handle points to.
struct FakeHandle {
    image: Arc<FakeImage>,
    number: usize,
}

struct FakeCompletion {
    argument: *mut c_void,
    result: isize,
}

/// What a connection of the fake is.
struct FakeCluster {
    fails: bool,
    /// Number of the connection.
    number: usize,
}

static IMAGES: Mutex<BTreeMap<String, Arc<FakeImage>>> = Mutex::new(BTreeMap::new());
/// Names of the clients, one for each connection that was made.
static CLIENTS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Addresses that were blocklisted, one for each call.
static BLOCKLIST: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Bytes of an object of the fake.
pub(crate) const OBJECT_BYTES: u64 = 1 << 20;

/// Creates an image.
pub(crate) fn create(name: &str, len_bytes: usize) -> Arc<FakeImage> {
    let state = FakeState { bytes: vec![0; len_bytes], ..FakeState::default() };
    let (errno, handles) = (AtomicI32::new(0), AtomicUsize::new(0));
    let image = Arc::new(FakeImage { state: Mutex::new(state), errno, handles });
    let mut images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    images.insert(name.to_owned(), Arc::clone(&image));
    image
}

/// How often a client has connected.
pub(crate) fn connect_count(client: &str) -> usize {
    let clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    clients.iter().filter(|name| *name == client).count()
}

/// How often a client was blocklisted.
pub(crate) fn blocklist_count(addresses: &str) -> usize {
    let blocklist = BLOCKLIST.lock().unwrap_or_else(PoisonError::into_inner);
    blocklist.iter().filter(|found| *found == addresses).count()
}

impl FakeImage {
    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds requests from now on until they are released.
    pub(crate) fn hold(&self) {
        self.lock().holds = true;
    }

    /// Completes the held requests, the last one first, and holds no more.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        state.holds = false;
        let delays = state.delays_signals;
        for handle in state.open.values_mut() {
            while let Some(completion) = handle.held.pop() {
                handle.complete(completion, delays);
            }
        }
    }

    /// Signals no completion from now on, or all those that were not.
    pub(crate) fn delay_signals(&self, delays: bool) {
        let mut state = self.lock();
        state.delays_signals = delays;
        for handle in state.open.values_mut() {
            for _ in 0..std::mem::take(&mut handle.unsignaled) {
                handle.signal();
            }
        }
    }

    pub(crate) fn held_count(&self) -> usize {
        self.lock().open.values().map(|handle| handle.held.len()).sum()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    pub(crate) fn set_option(&self, name: &'static CStr, value: &'static CStr) {
        self.lock().options.push((name, value));
    }

    pub(crate) fn take_calls(&self) -> Vec<(&'static str, usize)> {
        std::mem::take(&mut self.lock().calls)
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.lock().lock_owner.is_some()
    }

    /// Another client breaks the lock.
    pub(crate) fn break_lock(&self) {
        self.lock().lock_owner = None;
    }

    /// Another client changes the size.
    pub(crate) fn resize(&self, len_bytes: usize) {
        let mut state = self.lock();
        state.bytes.resize(len_bytes, 0);
        let watches: Vec<_> = state.open.values().filter_map(|handle| handle.watch).collect();
        drop(state);
        for (callback, argument) in watches {
            // SAFETY: tests close no image meanwhile, so the watch and its argument exist.
            unsafe { callback(argument as *mut c_void) };
        }
    }
}

impl FakeHandle {
    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.image.lock()
    }

    /// Changes the state of this handle.
    fn change<T>(&self, change: impl FnOnce(&mut HandleState) -> T) -> T {
        change(self.lock().open.entry(self.number).or_default())
    }

    /// Starts a request, whose bytes have moved already.
    fn start(&self, completion: Completion, result: isize) -> c_int {
        let errno = self.image.errno.load(Ordering::Relaxed);
        let result = if errno == 0 { result } else { -(errno as isize) };
        // SAFETY: the completion was made by `create_completion` and is not polled yet.
        unsafe { (*completion.cast::<FakeCompletion>()).result = result };
        let mut state = self.lock();
        let (holds, delays) = (state.holds, state.delays_signals);
        let handle = state.open.entry(self.number).or_default();
        if holds {
            handle.held.push(completion as usize);
        } else {
            handle.complete(completion as usize, delays);
        }
        0
    }
}

impl HandleState {
    fn complete(&mut self, completion: usize, delays_signal: bool) {
        self.completed.push(completion);
        if delays_signal {
            self.unsignaled += 1;
        } else {
            self.signal();
        }
    }

    fn signal(&self) {
        let one = 1_u64;
        // SAFETY: the word outlives the call; the descriptor is that of the open image.
        unsafe { libc::write(self.descriptor, (&raw const one).cast(), 8) };
    }
}

impl FakeState {
    /// The bytes of a request; `None` beyond the end.
    fn range(&mut self, offset: u64, len: usize) -> Option<&mut [u8]> {
        let start = usize::try_from(offset).ok()?;
        self.bytes.get_mut(start..start.checked_add(len)?)
    }
}

fn image<'a>(handle: ImageHandle) -> &'a FakeHandle {
    // SAFETY: a handle is a box that `open` has leaked and `close` frees.
    unsafe { &*handle.cast::<FakeHandle>() }
}

fn text<'a>(address: *const c_char) -> &'a str {
    // SAFETY: all callers pass C strings that outlive the call.
    unsafe { CStr::from_ptr(address) }.to_str().unwrap_or("")
}

fn store<T>(address: *mut T, value: T) {
    // SAFETY: all callers pass addresses of variables that outlive the call.
    unsafe { address.write(value) };
}

fn store_text(address: *mut c_char, value: &CStr) {
    for (index, byte) in value.to_bytes_with_nul().iter().enumerate() {
        store(address.wrapping_add(index).cast(), *byte);
    }
}

fn move_out(bytes: &[u8], address: *mut c_char) {
    // SAFETY: the memory of a request has its length and is accessed by nothing else meanwhile.
    unsafe { address.cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
}

fn move_in(bytes: &mut [u8], address: *const c_char) {
    // SAFETY: as above.
    unsafe { bytes.as_mut_ptr().copy_from(address.cast(), bytes.len()) };
}

fn vectors<'a>(list: *const iovec, count: c_int) -> &'a [iovec] {
    // SAFETY: the list belongs to the record of the request.
    unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) }
}

unsafe extern "C" fn create2(
    cluster: *mut Rados,
    _: *const c_char,
    client: *const c_char,
    _: u64,
) -> c_int {
    let mut clients = CLIENTS.lock().unwrap_or_else(PoisonError::into_inner);
    clients.push(text(client).to_owned());
    let connection = FakeCluster { fails: false, number: clients.len() };
    store(cluster, Box::into_raw(Box::new(connection)).cast());
    0
}

unsafe extern "C" fn conf_read_file(_: Rados, path: *const c_char) -> c_int {
    if !path.is_null() && text(path).contains("missing") { -libc::ENOENT } else { 0 }
}

unsafe extern "C" fn conf_set(cluster: Rados, key: *const c_char, _: *const c_char) -> c_int {
    if text(key) == "no_quorum" {
        // SAFETY: the handle is a box that `create2` has leaked, used by one thread at a time.
        unsafe { (*cluster.cast::<FakeCluster>()).fails = true };
    }
    if text(key) == "unheard_of" { -libc::ENOENT } else { 0 }
}

unsafe extern "C" fn connect(cluster: Rados) -> c_int {
    // SAFETY: as above.
    if unsafe { (*cluster.cast::<FakeCluster>()).fails } { -libc::ETIMEDOUT } else { 0 }
}

unsafe extern "C" fn shutdown(cluster: Rados) {
    // SAFETY: the handle is a box that `create2` has leaked, and is closed once.
    drop(unsafe { Box::from_raw(cluster.cast::<FakeCluster>()) });
}

unsafe extern "C" fn cluster_fsid(_: Rados, address: *mut c_char, _: usize) -> c_int {
    store_text(address, c"11111111-2222-3333-4444-555555555555");
    0
}

unsafe extern "C" fn ioctx_create(_: Rados, pool: *const c_char, context: *mut Ioctx) -> c_int {
    store(context, std::ptr::dangling_mut::<u8>().cast());
    if text(pool) == "none" { -libc::ENOENT } else { 0 }
}

unsafe extern "C" fn ioctx_destroy(_: Ioctx) {}
unsafe extern "C" fn ioctx_set_namespace(_: Ioctx, _: *const c_char) {}
unsafe extern "C" fn ioctx_get_id(_: Ioctx) -> i64 {
    3
}
unsafe extern "C" fn set_pool_full_try(_: Ioctx) {}

unsafe extern "C" fn getaddrs(cluster: Rados, addresses: *mut *mut c_char) -> c_int {
    // SAFETY: the handle is a box that `create2` has leaked.
    let number = unsafe { (*cluster.cast::<FakeCluster>()).number };
    let text = CString::new(format!("127.0.0.1:0/{number}")).unwrap_or_default();
    store(addresses, text.into_raw());
    0
}

unsafe extern "C" fn buffer_free(text: *mut c_char) {
    // SAFETY: `getaddrs` has leaked it, and it is freed once.
    drop(unsafe { CString::from_raw(text) });
}

unsafe extern "C" fn blocklist_add(_: Rados, addresses: *mut c_char, _: u32) -> c_int {
    let mut blocklist = BLOCKLIST.lock().unwrap_or_else(PoisonError::into_inner);
    blocklist.push(text(addresses).to_owned());
    0
}

unsafe extern "C" fn wait_for_osdmap(_: Rados) -> c_int {
    0
}

unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int, extra: *mut c_int) {
    store(major, 1);
    store(minor, 16);
    store(extra, 0);
}

unsafe extern "C" fn open(
    _: Ioctx,
    name: *const c_char,
    handle: *mut ImageHandle,
    _: *const c_char,
) -> c_int {
    let images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(image) = images.get(text(name)) else { return -libc::ENOENT };
    image.handles.fetch_add(1, Ordering::Relaxed);
    let mut state = image.lock();
    state.next += 1;
    let number = state.next;
    state.open.insert(number, HandleState::default());
    drop(state);
    let open = FakeHandle { image: Arc::clone(image), number };
    store(handle, Box::into_raw(Box::new(open)).cast());
    0
}

unsafe extern "C" fn close(handle: ImageHandle) -> c_int {
    // SAFETY: the handle is a box that `open` has leaked, and is closed once.
    let FakeHandle { image, number } = *unsafe { Box::from_raw(handle.cast::<FakeHandle>()) };
    let mut state = image.lock();
    state.lock_owner.take_if(|owner| *owner == number);
    let closed = state.open.remove(&number).unwrap_or_default();
    drop(state);
    assert!(closed.held.is_empty() && closed.watch.is_none(), "closed with work in flight");
    image.handles.fetch_sub(1, Ordering::Relaxed);
    0
}

unsafe extern "C" fn stat(handle: ImageHandle, info: *mut ImageInfo, _: usize) -> c_int {
    let size = image(handle).lock().bytes.len() as u64;
    let (block_name_prefix, parent_name) = ([0; 24], [0; 96]);
    let object_count = size.div_ceil(OBJECT_BYTES);
    let (object_size, order, parent_pool) = (OBJECT_BYTES, 20, -1);
    store(
        info,
        ImageInfo {
            size,
            object_size,
            object_count,
            order,
            block_name_prefix,
            parent_pool,
            parent_name,
        },
    );
    0
}

unsafe extern "C" fn get_size(handle: ImageHandle, size: *mut u64) -> c_int {
    let image = image(handle);
    store(size, image.lock().bytes.len() as u64);
    -image.image.errno.load(Ordering::Relaxed)
}

unsafe extern "C" fn get_features(_: ImageHandle, features: *mut u64) -> c_int {
    store(features, 1 << 2);
    0
}

unsafe extern "C" fn get_id(_: ImageHandle, address: *mut c_char, _: usize) -> c_int {
    store_text(address, c"10a7");
    0
}

unsafe extern "C" fn get_stripe_unit(_: ImageHandle, bytes: *mut u64) -> c_int {
    store(bytes, OBJECT_BYTES);
    0
}

unsafe extern "C" fn config_list(
    handle: ImageHandle,
    list: *mut ConfigOption,
    count: *mut c_int,
) -> c_int {
    let options = image(handle).lock().options.clone();
    for (index, (name, value)) in options.iter().enumerate() {
        let (name, value) = (name.as_ptr().cast_mut(), value.as_ptr().cast_mut());
        store(list.wrapping_add(index), ConfigOption { name, value, source: 2 });
    }
    store(count, c_int::try_from(options.len()).unwrap_or(0));
    0
}

unsafe extern "C" fn config_cleanup(_: *mut ConfigOption, _: c_int) {}

unsafe extern "C" fn set_notification(
    handle: ImageHandle,
    descriptor: c_int,
    kind: c_int,
) -> c_int {
    image(handle).change(|state| state.descriptor = descriptor);
    if kind == 2 { 0 } else { -libc::EINVAL }
}

unsafe extern "C" fn poll_events(
    handle: ImageHandle,
    found: *mut Completion,
    count_max: c_int,
) -> c_int {
    image(handle).change(|state| {
        let count = state.completed.len().min(usize::try_from(count_max).unwrap_or(0));
        for (index, completion) in state.completed.drain(..count).enumerate() {
            store(found.wrapping_add(index), completion as Completion);
        }
        c_int::try_from(count).unwrap_or(0)
    })
}

unsafe extern "C" fn create_completion(
    argument: *mut c_void,
    callback: Option<IoCallback>,
    completion: *mut Completion,
) -> c_int {
    assert!(callback.is_none(), "completions are polled");
    store(completion, Box::into_raw(Box::new(FakeCompletion { argument, result: 0 })).cast());
    0
}

unsafe extern "C" fn return_value(completion: Completion) -> isize {
    // SAFETY: the completion is a box that `create_completion` has leaked.
    unsafe { (*completion.cast::<FakeCompletion>()).result }
}

unsafe extern "C" fn argument(completion: Completion) -> *mut c_void {
    // SAFETY: as above.
    unsafe { (*completion.cast::<FakeCompletion>()).argument }
}

unsafe extern "C" fn release(completion: Completion) {
    // SAFETY: as above; it is released once.
    drop(unsafe { Box::from_raw(completion.cast::<FakeCompletion>()) });
}

unsafe extern "C" fn read(
    handle: ImageHandle,
    offset: u64,
    len: usize,
    address: *mut c_char,
    completion: Completion,
) -> c_int {
    let mut state = image(handle).lock();
    state.calls.push(("read", 1));
    let moved = state.range(offset, len).map(|bytes| move_out(bytes, address));
    drop(state);
    image(handle).start(completion, if moved.is_some() { len as isize } else { 0 })
}

unsafe extern "C" fn readv(
    handle: ImageHandle,
    list: *const iovec,
    count: c_int,
    mut offset: u64,
    completion: Completion,
) -> c_int {
    let list = vectors(list, count);
    let mut state = image(handle).lock();
    state.calls.push(("readv", list.len()));
    let mut len = 0;
    for iovec { iov_base, iov_len } in list {
        let Some(bytes) = state.range(offset, *iov_len) else { break };
        move_out(bytes, iov_base.cast());
        (offset, len) = (offset + *iov_len as u64, len + *iov_len as isize);
    }
    drop(state);
    image(handle).start(completion, len)
}

unsafe extern "C" fn write(
    handle: ImageHandle,
    offset: u64,
    len: usize,
    address: *const c_char,
    completion: Completion,
) -> c_int {
    let mut state = image(handle).lock();
    state.calls.push(("write", 1));
    let moved = state.range(offset, len).map(|bytes| move_in(bytes, address));
    drop(state);
    image(handle).start(completion, if moved.is_some() { 0 } else { -(libc::EINVAL as isize) })
}

unsafe extern "C" fn writev(
    handle: ImageHandle,
    list: *const iovec,
    count: c_int,
    mut offset: u64,
    completion: Completion,
) -> c_int {
    let list = vectors(list, count);
    let mut state = image(handle).lock();
    state.calls.push(("writev", list.len()));
    for iovec { iov_base, iov_len } in list {
        let Some(bytes) = state.range(offset, *iov_len) else { break };
        move_in(bytes, iov_base.cast_const().cast());
        offset += *iov_len as u64;
    }
    drop(state);
    image(handle).start(completion, 0)
}

unsafe extern "C" fn flush(handle: ImageHandle, completion: Completion) -> c_int {
    image(handle).lock().calls.push(("flush", 0));
    image(handle).start(completion, 0)
}

fn fill_zeroes(handle: ImageHandle, name: &'static str, offset: u64, len: usize) {
    let mut state = image(handle).lock();
    state.calls.push((name, 0));
    if let Some(bytes) = state.range(offset, len) {
        bytes.fill(0);
    }
}

unsafe extern "C" fn discard(handle: ImageHandle, offset: u64, len: u64, c: Completion) -> c_int {
    fill_zeroes(handle, "discard", offset, usize::try_from(len).unwrap_or(0));
    image(handle).start(c, 0)
}

unsafe extern "C" fn write_zeroes(
    handle: ImageHandle,
    offset: u64,
    len: usize,
    completion: Completion,
    _: c_int,
    _: c_int,
) -> c_int {
    fill_zeroes(handle, "write_zeroes", offset, len);
    image(handle).start(completion, 0)
}

unsafe extern "C" fn compare_and_write(
    handle: ImageHandle,
    offset: u64,
    len: usize,
    compared: *const c_char,
    new: *const c_char,
    completion: Completion,
    mismatch: *mut u64,
    _: c_int,
) -> isize {
    let mut expected = vec![0; len];
    move_in(&mut expected, compared);
    let mut state = image(handle).lock();
    state.calls.push(("compare_and_write", 0));
    let Some(bytes) = state.range(offset, len) else { return -(libc::EINVAL as isize) };
    let differs = bytes.iter().zip(&expected).position(|(one, other)| one != other);
    let result = match differs {
        Some(index) => {
            store(mismatch, index as u64);
            -(libc::EILSEQ as isize)
        }
        None => {
            move_in(bytes, new);
            0
        }
    };
    drop(state);
    image(handle).start(completion, result) as isize
}

unsafe extern "C" fn update_watch(
    handle: ImageHandle,
    number: *mut u64,
    callback: UpdateCallback,
    argument: *mut c_void,
) -> c_int {
    image(handle).change(|state| state.watch = Some((callback, argument as usize)));
    store(number, 7);
    0
}

unsafe extern "C" fn update_unwatch(handle: ImageHandle, number: u64) -> c_int {
    assert_eq!(number, 7, "the number of the watch");
    image(handle).change(|state| state.watch = None);
    0
}

unsafe extern "C" fn lock_acquire(handle: ImageHandle, _: c_int) -> c_int {
    let number = image(handle).number;
    let mut state = image(handle).lock();
    if *state.lock_owner.get_or_insert(number) == number { 0 } else { -libc::EROFS }
}

unsafe extern "C" fn is_lock_owner(handle: ImageHandle, owns: *mut c_int) -> c_int {
    let image = image(handle);
    store(owns, (image.lock().lock_owner == Some(image.number)).into());
    0
}

unsafe extern "C" fn diff_iterate(
    handle: ImageHandle,
    _: *const c_char,
    offset: u64,
    len: u64,
    _: u8,
    _: u8,
    callback: DiffCallback,
    argument: *mut c_void,
) -> c_int {
    let bytes = image(handle).image.bytes();
    for start in (offset..offset + len).step_by(4096) {
        let at = usize::try_from(start).unwrap_or(0);
        if bytes[at..bytes.len().min(at + 4096)].iter().any(|byte| *byte != 0) {
            // SAFETY: the callback and its argument are valid during the call.
            unsafe { callback(start, 4096, 1, argument) };
        }
    }
    0
}

unsafe extern "C" fn list2(_: Ioctx, _: *mut NamedImage, _: *mut usize) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn list_cleanup(_: *mut NamedImage, _: usize) {}
unsafe extern "C" fn options_create(_: *mut ImageOptions) {}
unsafe extern "C" fn options_destroy(_: ImageOptions) {}
unsafe extern "C" fn options_set(_: ImageOptions, _: c_int, _: u64) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn create4(_: Ioctx, _: *const c_char, _: u64, _: ImageOptions) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn clone3(
    _: Ioctx,
    _: *const c_char,
    _: *const c_char,
    _: Ioctx,
    _: *const c_char,
    _: ImageOptions,
) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn remove(_: Ioctx, _: *const c_char) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn resize(handle: ImageHandle, size: u64) -> c_int {
    image(handle).image.resize(usize::try_from(size).unwrap_or(0));
    0
}
unsafe extern "C" fn flatten(_: ImageHandle) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn with_snapshot(_: ImageHandle, _: *const c_char) -> c_int {
    -libc::EOPNOTSUPP
}
unsafe extern "C" fn snap_list(_: ImageHandle, _: *mut SnapshotInfo, _: *mut c_int) -> c_int {
    0
}
unsafe extern "C" fn snap_list_end(_: *mut SnapshotInfo) {}
unsafe extern "C" fn snap_get_id(_: ImageHandle, _: *const c_char, id: *mut u64) -> c_int {
    store(id, 9);
    0
}

/// The functions of the fake.
pub(crate) static FUNCTIONS: Functions = Functions {
    rados_create2: create2,
    rados_conf_read_file: conf_read_file,
    rados_conf_set: conf_set,
    rados_connect: connect,
    rados_shutdown: shutdown,
    rados_cluster_fsid: cluster_fsid,
    rados_ioctx_create: ioctx_create,
    rados_ioctx_destroy: ioctx_destroy,
    rados_ioctx_set_namespace: ioctx_set_namespace,
    rados_ioctx_get_id: ioctx_get_id,
    rados_set_pool_full_try: set_pool_full_try,
    rados_getaddrs: getaddrs,
    rados_buffer_free: buffer_free,
    rados_blocklist_add: blocklist_add,
    rados_wait_for_latest_osdmap: wait_for_osdmap,
    rados_create_read_op: object_functions::create_op,
    rados_release_read_op: object_functions::release_op,
    rados_read_op_omap_get_vals2: object_functions::omap_get_vals,
    rados_read_op_operate: object_functions::read_operate,
    rados_omap_get_next2: object_functions::omap_get_next,
    rados_omap_get_end: object_functions::release_op,
    rados_create_write_op: object_functions::create_op,
    rados_release_write_op: object_functions::release_op,
    rados_write_op_create: object_functions::op_create,
    rados_write_op_omap_cmp2: object_functions::omap_cmp,
    rados_write_op_omap_set2: object_functions::omap_set,
    rados_write_op_omap_rm_keys2: object_functions::omap_rm_keys,
    rados_write_op_operate: object_functions::write_operate,
    rados_lock_shared: object_functions::lock_shared,
    rados_unlock: object_functions::unlock,
    rados_list_lockers: object_functions::list_lockers,
    rados_watch3: object_functions::watch3,
    rados_unwatch2: object_functions::unwatch2,
    rados_watch_flush: object_functions::watch_flush,
    rados_notify_ack: object_functions::notify_ack,
    rados_aio_create_completion2: object_functions::aio_create,
    rados_aio_notify: object_functions::aio_notify,
    rados_aio_is_complete: object_functions::aio_result,
    rados_aio_wait_for_complete: object_functions::aio_result,
    rados_aio_release: object_functions::release_op,
    rbd_version: version,
    rbd_open: open,
    rbd_open_read_only: open,
    rbd_close: close,
    rbd_stat: stat,
    rbd_get_size: get_size,
    rbd_get_features: get_features,
    rbd_get_id: get_id,
    rbd_get_stripe_unit: get_stripe_unit,
    rbd_config_image_list: config_list,
    rbd_config_image_list_cleanup: config_cleanup,
    rbd_set_image_notification: set_notification,
    rbd_poll_io_events: poll_events,
    rbd_aio_create_completion: create_completion,
    rbd_aio_get_return_value: return_value,
    rbd_aio_get_arg: argument,
    rbd_aio_release: release,
    rbd_aio_read: read,
    rbd_aio_readv: readv,
    rbd_aio_write: write,
    rbd_aio_writev: writev,
    rbd_aio_flush: flush,
    rbd_aio_discard: discard,
    rbd_aio_write_zeroes: write_zeroes,
    rbd_aio_compare_and_write: compare_and_write,
    rbd_update_watch: update_watch,
    rbd_update_unwatch: update_unwatch,
    rbd_lock_acquire: lock_acquire,
    rbd_is_exclusive_lock_owner: is_lock_owner,
    rbd_diff_iterate2: diff_iterate,
    rbd_list2: list2,
    rbd_image_spec_list_cleanup: list_cleanup,
    rbd_image_options_create: options_create,
    rbd_image_options_destroy: options_destroy,
    rbd_image_options_set_uint64: options_set,
    rbd_create4: create4,
    rbd_clone3: clone3,
    rbd_remove: remove,
    rbd_resize: resize,
    rbd_flatten: flatten,
    rbd_snap_create: with_snapshot,
    rbd_snap_remove: with_snapshot,
    rbd_snap_rollback: with_snapshot,
    rbd_snap_list: snap_list,
    rbd_snap_list_end: snap_list_end,
    rbd_snap_get_id: snap_get_id,
};
