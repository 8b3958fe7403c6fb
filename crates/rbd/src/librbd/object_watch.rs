//! Notifications between the clients that watch an object.

use std::ffi::{CString, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::Span;
use tenmil_linux::EventFdVectors;

use super::connection::PoolContext;
use super::functions::{AioCompletion, Functions};
use super::{CephErrno, check};

/// Watch of an object. Dropping it ends the watch, which blocks until the cluster has answered.
#[derive(Debug)]
pub(crate) struct ObjectWatch {
    /// Number of the watch in librados.
    number: u64,
    state: ManuallyDrop<Arc<WatchState>>,
}

/// What the callbacks of librados access.
#[derive(Debug)]
struct WatchState {
    pool: Arc<PoolContext>,
    object: CString,
    is_lost: AtomicBool,
    /// Signaled at each notification, and when the watch is lost.
    signal: EventFdVectors,
}

/// A notification under way. Dropping it waits until every client has confirmed it, or its time limit has passed.
#[derive(Debug)]
pub(crate) struct Notification {
    functions: &'static Functions,
    handle: AioCompletion,
    is_started: bool,
    /// Open as long as the notification is under way.
    _pool: Arc<PoolContext>,
}

// SAFETY: `rados_completion_t` may be used by any thread: the functions of librados take its lock themselves.
unsafe impl Send for Notification {}

impl ObjectWatch {
    /// Watches an object, which must exist.
    ///
    /// # Errors
    ///
    /// ENOENT if it does not exist.
    pub(crate) fn new(
        pool: &Arc<PoolContext>,
        object: &CString,
        signal: &EventFdVectors,
    ) -> Result<Self, CephErrno> {
        let state = Arc::new(WatchState {
            pool: Arc::clone(pool),
            object: object.clone(),
            is_lost: AtomicBool::new(false),
            signal: signal.clone(),
        });
        let (mut number, argument) = (0, Arc::as_ptr(&state).cast_mut().cast::<c_void>());
        let watch = pool.connection.functions.rados_watch3;
        // SAFETY: the pool is open and the name is a C string. The argument stays valid until the watch has ended
        // and its callbacks have returned. A time limit of zero is the default one.
        let watched = unsafe {
            watch(
                pool.handle,
                object.as_ptr(),
                &raw mut number,
                confirm_notification,
                report_lost_watch,
                0,
                argument,
            )
        };
        check(watched)?;
        Ok(Self { number, state: ManuallyDrop::new(state) })
    }

    /// Whether the watch was lost: nothing is notified any more.
    pub(crate) fn is_lost(&self) -> bool {
        // Relaxed: the flag publishes nothing else.
        self.state.is_lost.load(Ordering::Relaxed)
    }
}

impl Drop for ObjectWatch {
    fn drop(&mut self) {
        let pool = Arc::clone(&self.state.pool);
        let functions = pool.connection.functions;
        // SAFETY: the pool is open, and the number is that of a watch of it.
        let ended = unsafe { (functions.rados_unwatch2)(pool.handle, self.number) };
        // SAFETY: the connection is open.
        let flushed = unsafe { (functions.rados_watch_flush)(pool.connection.handle) };
        // A watch that was lost is not one of the cluster, and so cannot be ended there.
        if (ended >= 0 || self.is_lost()) && flushed >= 0 {
            // SAFETY: dropped once. The watch has ended in librados, and the callbacks have returned; if a call
            // fails that is not certain, and it is kept.
            unsafe { ManuallyDrop::drop(&mut self.state) };
        }
    }
}

impl PoolContext {
    /// Notifies the clients that watch an object, for `time_limit` at most.
    pub(crate) fn notify(
        self: &Arc<Self>,
        object: &CString,
        time_limit: Span,
    ) -> Result<Notification, CephErrno> {
        let functions = self.connection.functions;
        let mut handle: AioCompletion = ptr::null_mut();
        let create = functions.rados_aio_create_completion2;
        // SAFETY: there is no callback and no argument; the handle is stored to a variable that outlives the call.
        check(unsafe { create(ptr::null_mut(), None, &raw mut handle) })?;
        let pool = Arc::clone(self);
        let mut notification = Notification { functions, handle, is_started: false, _pool: pool };
        let notify = functions.rados_aio_notify;
        // SAFETY: pool and completion are open, the name is a C string, there are no data, and null discards the
        // replies.
        let started = unsafe {
            notify(
                self.handle,
                object.as_ptr(),
                handle,
                ptr::null(),
                0,
                time_limit.ns / 1_000_000,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check(started)?;
        notification.is_started = true;
        Ok(notification)
    }
}

impl Notification {
    /// Whether every client has confirmed it, or its time limit has passed.
    pub(crate) fn is_complete(&self) -> bool {
        // SAFETY: the completion is open.
        unsafe { (self.functions.rados_aio_is_complete)(self.handle) != 0 }
    }
}

impl Drop for Notification {
    fn drop(&mut self) {
        if self.is_started {
            // SAFETY: the completion is open, and its request was started.
            unsafe { (self.functions.rados_aio_wait_for_complete)(self.handle) };
        }
        // SAFETY: it is released once.
        unsafe { (self.functions.rados_aio_release)(self.handle) };
    }
}

/// Called by a thread of librados for each notification.
unsafe extern "C" fn confirm_notification(
    argument: *mut c_void,
    notification: u64,
    watch: u64,
    _: u64,
    _: *mut c_void,
    _: usize,
) {
    // SAFETY: the argument is that of `ObjectWatch::new`, which outlives the last call.
    let state = unsafe { &*argument.cast::<WatchState>() };
    state.signal.signal(0);
    let WatchState { pool, object, .. } = state;
    let confirm = pool.connection.functions.rados_notify_ack;
    // SAFETY: the pool is open, the name is a C string, and the confirmation has no data.
    unsafe { confirm(pool.handle, object.as_ptr(), notification, watch, ptr::null(), 0) };
}

/// Called by a thread of librados when a watch is lost.
unsafe extern "C" fn report_lost_watch(argument: *mut c_void, _: u64, _: c_int) {
    // SAFETY: as above.
    let state = unsafe { &*argument.cast::<WatchState>() };
    state.is_lost.store(true, Ordering::Relaxed);
    state.signal.signal(0);
}
