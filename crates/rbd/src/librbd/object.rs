//! An object of a pool as a map (omap) that is changed by compare-and-swap, and its lock with a duration. Every call blocks
//! until the cluster has answered, or for the time that the option `rados_osd_op_timeout` permits.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use tenmil_base::Span;

use super::connection::PoolContext;
use super::functions::{
    COMPARE_EQUAL, CREATE_EXCLUSIVE, Functions, LOCK_MUST_RENEW, OmapIterator, ReadOp, WriteOp,
};
use super::{CephErrno, c_string, check};

/// Change of the map of an object. It is executed only if a key has the value that is expected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObjectChange {
    /// Key that is compared, and its value.
    pub(crate) expected: (String, String),
    /// Keys to write.
    pub(crate) puts: Vec<(String, String)>,
    /// Keys to delete.
    pub(crate) removed: Vec<String>,
}

/// A read of an object, until it is dropped.
struct ReadOperation {
    functions: &'static Functions,
    handle: ReadOp,
}

/// A write to an object, until it is dropped.
struct WriteOperation {
    functions: &'static Functions,
    handle: WriteOp,
}

/// Keys and values that were read.
struct MapIterator {
    functions: &'static Functions,
    handle: OmapIterator,
}

/// Entries that a read returns: the largest number that an OSD returns by default.
const PAGE: u64 = 1024;
/// Bytes of a list of lockers that are read at first; a longer one is read again with its length.
const LOCKERS_BYTES: usize = 4096;

impl PoolContext {
    /// Entries of the map whose keys follow `after`, and whether more follow. An object that does not exist has none.
    pub(crate) fn read_map_page(
        &self,
        object: &CStr,
        after: &str,
    ) -> Result<(BTreeMap<String, String>, bool), CephErrno> {
        let functions = self.connection.functions;
        let after = c_string(after)?;
        let operation = ReadOperation::new(functions);
        let (mut iterator, mut has_more, mut result) = (ptr::null_mut(), 0_u8, 0);
        let get = functions.rados_read_op_omap_get_vals2;
        // SAFETY: the operation is open, the texts are C strings, and the three variables outlive the operation,
        // which is executed below and not used again.
        unsafe {
            get(
                operation.handle,
                after.as_ptr(),
                c"".as_ptr(),
                PAGE,
                &raw mut iterator,
                &raw mut has_more,
                &raw mut result,
            );
        }
        // The call has created it.
        let iterator = MapIterator { functions, handle: iterator };
        let operate = functions.rados_read_op_operate;
        // SAFETY: operation and pool are open, and the name is a C string.
        let executed = unsafe { operate(operation.handle, self.handle, object.as_ptr(), 0) };
        match check(executed).and(check(result)) {
            Ok(_) => Ok((iterator.read_all()?, has_more != 0)),
            Err(CephErrno(libc::ENOENT)) => Ok((BTreeMap::new(), false)),
            Err(errno) => Err(errno),
        }
    }

    /// Creates an object with these entries in its map.
    ///
    /// # Errors
    ///
    /// EEXIST if it exists.
    pub(crate) fn create_map(
        &self,
        object: &CStr,
        entries: &[(String, String)],
    ) -> Result<(), CephErrno> {
        let functions = self.connection.functions;
        let operation = WriteOperation::new(functions);
        let create = functions.rados_write_op_create;
        // SAFETY: the operation is open, and a null category is none.
        unsafe { create(operation.handle, CREATE_EXCLUSIVE, ptr::null()) };
        operation.set_entries(entries);
        operation.execute(self, object)
    }

    /// Executes a change.
    ///
    /// # Errors
    ///
    /// ECANCELED if the key has another value or does not exist, ENOENT if the object does not exist.
    pub(crate) fn change_map(&self, object: &CStr, change: &ObjectChange) -> Result<(), CephErrno> {
        let functions = self.connection.functions;
        let operation = WriteOperation::new(functions);
        let (key, value) = &change.expected;
        let compare = functions.rados_write_op_omap_cmp2;
        // SAFETY: the operation is open, and key and value have the lengths that are passed with them and are
        // copied. No result of the comparison is stored.
        unsafe {
            compare(
                operation.handle,
                key.as_ptr().cast(),
                COMPARE_EQUAL,
                value.as_ptr().cast(),
                key.len(),
                value.len(),
                ptr::null_mut(),
            );
        }
        operation.set_entries(&change.puts);
        operation.remove_keys(&change.removed);
        operation.execute(self, object)
    }

    /// Locks an object together with others, for a time. `cookie` distinguishes the locks of a client.
    ///
    /// # Errors
    ///
    /// EEXIST if this client has the lock already.
    pub(crate) fn lock_for(
        &self,
        object: &CStr,
        lock: &CStr,
        cookie: &str,
        time: Span,
    ) -> Result<(), CephErrno> {
        self.lock_shared(object, lock, cookie, time, 0)
    }

    /// Renews a lock of this client for its whole time.
    ///
    /// # Errors
    ///
    /// ENOENT if it has ended.
    pub(crate) fn renew_lock(
        &self,
        object: &CStr,
        lock: &CStr,
        cookie: &str,
        time: Span,
    ) -> Result<(), CephErrno> {
        self.lock_shared(object, lock, cookie, time, LOCK_MUST_RENEW)
    }

    fn lock_shared(
        &self,
        object: &CStr,
        lock: &CStr,
        cookie: &str,
        time: Span,
        flags: u8,
    ) -> Result<(), CephErrno> {
        let cookie = c_string(cookie)?;
        let mut time = libc::timeval {
            tv_sec: i64::try_from(time.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_usec: i64::try_from(time.ns % 1_000_000_000 / 1000).unwrap_or(0),
        };
        let (empty, request) = (c"".as_ptr(), self.connection.functions.rados_lock_shared);
        // SAFETY: the pool is open, all texts are C strings, and the time outlives the call.
        let locked = unsafe {
            request(
                self.handle,
                object.as_ptr(),
                lock.as_ptr(),
                cookie.as_ptr(),
                empty,
                empty,
                &raw mut time,
                flags,
            )
        };
        check(locked).map(drop)
    }

    /// Ends a lock of this client.
    ///
    /// # Errors
    ///
    /// ENOENT if it has ended.
    pub(crate) fn unlock(&self, object: &CStr, lock: &CStr, cookie: &str) -> Result<(), CephErrno> {
        let cookie = c_string(cookie)?;
        let unlock = self.connection.functions.rados_unlock;
        // SAFETY: the pool is open, and all texts are C strings.
        let unlocked =
            unsafe { unlock(self.handle, object.as_ptr(), lock.as_ptr(), cookie.as_ptr()) };
        check(unlocked).map(drop)
    }

    /// Cookies of the locks that have not ended.
    pub(crate) fn lock_cookies(
        &self,
        object: &CStr,
        lock: &CStr,
    ) -> Result<Vec<String>, CephErrno> {
        let list = self.connection.functions.rados_list_lockers;
        let mut len = [LOCKERS_BYTES; 4];
        loop {
            let [mut tag, mut clients, mut cookies, mut addresses] = len.map(|len| vec![0_u8; len]);
            let [tag_len, clients_len, cookies_len, addresses_len] =
                len.each_mut().map(ptr::from_mut);
            let mut is_exclusive: c_int = 0;
            // SAFETY: the pool is open, the names are C strings, and each buffer has the length that is passed
            // with it.
            let listed = unsafe {
                list(
                    self.handle,
                    object.as_ptr(),
                    lock.as_ptr(),
                    &raw mut is_exclusive,
                    tag.as_mut_ptr().cast(),
                    tag_len,
                    clients.as_mut_ptr().cast(),
                    clients_len,
                    cookies.as_mut_ptr().cast(),
                    cookies_len,
                    addresses.as_mut_ptr().cast(),
                    addresses_len,
                )
            };
            match check(c_int::try_from(listed).unwrap_or(c_int::MAX)) {
                // The buffers were short, and have the lengths that were stored by now.
                Err(CephErrno(libc::ERANGE)) => {}
                Err(CephErrno(libc::ENOENT)) => return Ok(Vec::new()),
                Err(errno) => return Err(errno),
                Ok(count) => {
                    let texts = cookies.split(|byte| *byte == 0);
                    let texts = texts.map(|text| String::from_utf8_lossy(text).into_owned());
                    return Ok(texts.take(usize::try_from(count).unwrap_or(0)).collect());
                }
            }
        }
    }
}

impl ReadOperation {
    fn new(functions: &'static Functions) -> Self {
        // SAFETY: it has no arguments.
        Self { functions, handle: unsafe { (functions.rados_create_read_op)() } }
    }
}

impl Drop for ReadOperation {
    fn drop(&mut self) {
        // SAFETY: `new` has created it, and it is released once.
        unsafe { (self.functions.rados_release_read_op)(self.handle) };
    }
}

impl WriteOperation {
    fn new(functions: &'static Functions) -> Self {
        // SAFETY: it has no arguments.
        Self { functions, handle: unsafe { (functions.rados_create_write_op)() } }
    }

    fn execute(&self, pool: &PoolContext, object: &CStr) -> Result<(), CephErrno> {
        let operate = self.functions.rados_write_op_operate;
        // SAFETY: operation and pool are open, the name is a C string, and a null time is the present.
        let executed =
            unsafe { operate(self.handle, pool.handle, object.as_ptr(), ptr::null_mut(), 0) };
        check(executed).map(drop)
    }

    fn set_entries(&self, entries: &[(String, String)]) {
        let keys: Vec<*const c_char> = entries.iter().map(|(key, _)| key.as_ptr().cast()).collect();
        let values: Vec<*const c_char> =
            entries.iter().map(|(_, value)| value.as_ptr().cast()).collect();
        let key_lens: Vec<usize> = entries.iter().map(|(key, _)| key.len()).collect();
        let value_lens: Vec<usize> = entries.iter().map(|(_, value)| value.len()).collect();
        let set = self.functions.rados_write_op_omap_set2;
        // SAFETY: the operation is open; each list has an entry for each key, and each text the length in the
        // list of lengths. All of it is copied.
        unsafe {
            set(
                self.handle,
                keys.as_ptr(),
                values.as_ptr(),
                key_lens.as_ptr(),
                value_lens.as_ptr(),
                entries.len(),
            );
        }
    }

    fn remove_keys(&self, removed: &[String]) {
        let keys: Vec<*const c_char> = removed.iter().map(|key| key.as_ptr().cast()).collect();
        let lens: Vec<usize> = removed.iter().map(String::len).collect();
        let remove = self.functions.rados_write_op_omap_rm_keys2;
        // SAFETY: as in `set_entries`.
        unsafe { remove(self.handle, keys.as_ptr(), lens.as_ptr(), removed.len()) };
    }
}

impl Drop for WriteOperation {
    fn drop(&mut self) {
        // SAFETY: `new` has created it, and it is released once.
        unsafe { (self.functions.rados_release_write_op)(self.handle) };
    }
}

impl MapIterator {
    /// The entries. Keys and values that are no UTF-8 are not of this program.
    fn read_all(&self) -> Result<BTreeMap<String, String>, CephErrno> {
        let mut entries = BTreeMap::new();
        loop {
            let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
            let (mut key_len, mut value_len) = (0, 0);
            let next = self.functions.rados_omap_get_next2;
            // SAFETY: the iterator is open, its read was executed, and the variables outlive the call.
            let found = unsafe {
                next(
                    self.handle,
                    &raw mut key,
                    &raw mut value,
                    &raw mut key_len,
                    &raw mut value_len,
                )
            };
            check(found)?;
            if key.is_null() {
                return Ok(entries);
            }
            entries.insert(owned_bytes(key, key_len)?, owned_bytes(value, value_len)?);
        }
    }
}

impl Drop for MapIterator {
    fn drop(&mut self) {
        // SAFETY: the library has created it, and it is released once.
        unsafe { (self.functions.rados_omap_get_end)(self.handle) };
    }
}

/// A copy of a text of the iterator.
fn owned_bytes(text: *const c_char, len: usize) -> Result<String, CephErrno> {
    if len == 0 {
        return Ok(String::new());
    }
    // SAFETY: the library has stored `len` bytes there, which stay until the iterator is released.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    String::from_utf8(bytes.to_vec()).map_err(|_| CephErrno(libc::EILSEQ))
}
