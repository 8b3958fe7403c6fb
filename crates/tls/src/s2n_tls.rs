//! s2n-tls: configurations and handshakes, with callbacks instead of a socket. Its part ends with the
//! handshake, when it hands over the secrets of both directions.
//!
//! # Unsafe
//!
//! Guarantees of the safe interface:
//!
//! - A connection is created, used and freed by its only owner. It moves between threads only as a
//!   whole, and a configuration is not changed after it has been built.
//! - The library calls back only during a call of this file. The context of its callbacks is a [`Call`]
//!   on the stack of that call, and is null between calls.
//! - The library is given pointers to memory that outlives the call, with its length.

#![expect(unsafe_code, reason = "the library speaks C")]

mod memory;

use std::ffi::{CStr, CString, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use s2n_tls_sys as s2n;
use tenmil_nvme_auth::{Hash, SecretBytes};
use zeroize::Zeroizing;

use crate::cipher_io::{CipherIo, Received};
use crate::psk::Psk;
use crate::record_layer::Side;

/// Class of an error of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// The peer has closed the stream, or the session.
    Closed,
    /// The peer has sent an alert.
    Alert,
    /// The peer has violated the protocol, or a record is not authentic.
    Protocol,
    /// Everything else.
    Other,
}

/// Error of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LibraryError {
    pub(crate) class: ErrorClass,
    /// Name of the constant, such as `S2N_ERR_BAD_MESSAGE`.
    pub(crate) name: String,
    /// Text for people.
    pub(crate) text: String,
}

/// Configuration of connections.
#[derive(Debug)]
pub(crate) struct Config {
    raw: NonNull<s2n::s2n_config>,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    raw: NonNull<s2n::s2n_connection>,
    /// Used by the library as long as the connection lives.
    _config: Arc<Config>,
    /// Encrypted bytes that are received before those of the stream.
    replay: Vec<u8>,
}

/// Context of the callbacks during one call.
struct Call<'a> {
    io: &'a mut dyn CipherIo,
    replay: &'a mut Vec<u8>,
}

/// Resets the context of the callbacks at the end of a call.
struct CallGuard<'a> {
    raw: NonNull<s2n::s2n_connection>,
    call: PhantomData<&'a mut ()>,
}

/// Policy: TLS 1.3 only, AES-GCM and ChaCha20; P-256 first. Both ends check the suite that was negotiated.
const POLICY: &CStr = c"AWS-CRT-SDK-TLSv1.3-2023";

static INIT: OnceLock<Result<(), LibraryError>> = OnceLock::new();

// SAFETY: a built configuration is not changed: the library only counts its references to it and reads
// it, with atomic operations where threads share it.
unsafe impl Send for Config {}
// SAFETY: as above.
unsafe impl Sync for Config {}
// SAFETY: a connection has no thread affinity, and `Connection` is its only owner.
unsafe impl Send for Connection {}

/// Initializes the library once.
fn init() -> Result<(), LibraryError> {
    let init_once = || {
        memory::set_callbacks()?;
        // SAFETY: called once, before every other function but the one above, which has to precede it.
        check(unsafe { s2n::s2n_init() })
    };
    INIT.get_or_init(init_once).clone()
}

/// Result of a function that returns a negative number in case of an error.
fn check(result: c_int) -> Result<(), LibraryError> {
    if result >= 0 { Ok(()) } else { Err(take_error().unwrap_or_else(LibraryError::blocked)) }
}

/// Error of the last call on this thread; `None` if it was blocked. Resets it.
fn take_error() -> Option<LibraryError> {
    // SAFETY: the location is thread-local memory of the library.
    let location = unsafe { s2n::s2n_errno_location() };
    // SAFETY: as above; this thread is the only one that accesses it.
    let code = unsafe { *location };
    // SAFETY: as above. Zero is the value for no error.
    unsafe { *location = 0 };
    // SAFETY: the function accepts every number.
    let class = unsafe { s2n::s2n_error_get_type(code) };
    let class = match u32::try_from(class).unwrap_or(u32::MAX) {
        s2n::s2n_error_type::BLOCKED => return None,
        s2n::s2n_error_type::CLOSED => ErrorClass::Closed,
        s2n::s2n_error_type::ALERT => ErrorClass::Alert,
        s2n::s2n_error_type::PROTO => ErrorClass::Protocol,
        _ => ErrorClass::Other,
    };
    // SAFETY: the function accepts every number.
    let name = unsafe { s2n::s2n_strerror_name(code) };
    // SAFETY: the function accepts every number; null is its default language.
    let text = unsafe { s2n::s2n_strerror(code, std::ptr::null()) };
    let string = |text: *const std::ffi::c_char| {
        // SAFETY: the library returns static strings, which end with a null byte, or null.
        NonNull::new(text.cast_mut()).map(|text| unsafe { CStr::from_ptr(text.as_ptr()) })
    };
    let owned = |text: Option<&CStr>| {
        text.map_or_else(|| format!("error {code}"), |text| text.to_string_lossy().into_owned())
    };
    Some(LibraryError { class, name: owned(string(name)), text: owned(string(text)) })
}

impl LibraryError {
    /// Error for a call that cannot block.
    fn blocked() -> Self {
        Self { class: ErrorClass::Other, name: "blocked".into(), text: "blocked".into() }
    }

    /// Error for an argument that the library cannot represent.
    fn invalid(text: &str) -> Self {
        Self { class: ErrorClass::Other, name: "invalid".into(), text: text.into() }
    }
}

impl Config {
    /// Configuration without certificates.
    pub(crate) fn new() -> Result<Self, LibraryError> {
        init()?;
        // SAFETY: the library is initialized; null is handled.
        let raw = unsafe { s2n::s2n_config_new_minimal() };
        let raw =
            NonNull::new(raw).ok_or_else(|| take_error().unwrap_or_else(LibraryError::blocked))?;
        let config = Self { raw };
        // SAFETY: the configuration is exclusively owned; the string ends with a null byte.
        check(unsafe { s2n::s2n_config_set_cipher_preferences(raw.as_ptr(), POLICY.as_ptr()) })?;
        // No session is resumed, and a ticket would be a record after the handshake.
        // SAFETY: the configuration is exclusively owned.
        check(unsafe { s2n::s2n_config_set_session_tickets_onoff(raw.as_ptr(), 0) })?;
        let version = s2n::s2n_serialization_version::SERIALIZED_CONN_V1;
        // SAFETY: as above.
        check(unsafe { s2n::s2n_config_set_serialization_version(raw.as_ptr(), version) })?;
        Ok(config)
    }

    /// Adds a certificate chain and its private key, in PEM.
    pub(crate) fn add_certificate(
        &mut self,
        chain_pem: &[u8],
        key_pem: &[u8],
    ) -> Result<(), LibraryError> {
        let invalid = |_| LibraryError::invalid("a PEM file contains a null byte");
        let chain = CString::new(chain_pem).map_err(invalid)?;
        let key = CString::new(key_pem).map_err(invalid)?;
        let raw = self.raw.as_ptr();
        // SAFETY: the configuration is exclusively owned; both strings end with a null byte, and are
        // copied.
        let added = check(unsafe {
            s2n::s2n_config_add_cert_chain_and_key(raw, chain.as_ptr(), key.as_ptr())
        });
        drop(SecretBytes::new(key.into_bytes()));
        added
    }

    /// Requires certificates of clients that one of these authorities, in PEM, has signed.
    pub(crate) fn require_client_certificate(&mut self, ca_pem: &[u8]) -> Result<(), LibraryError> {
        self.trust(ca_pem)?;
        let raw = self.raw.as_ptr();
        let required = s2n::s2n_cert_auth_type::REQUIRED;
        // SAFETY: the configuration is exclusively owned.
        check(unsafe { s2n::s2n_config_set_client_auth_type(raw, required) })?;
        // SAFETY: as above; the callback has the type that is expected, and reads no argument.
        check(unsafe {
            s2n::s2n_config_set_verify_host_callback(raw, Some(accept_every_name), null_mut())
        })
    }

    /// Sends the added certificate to a server that requests one.
    pub(crate) fn offer_client_certificate(&mut self) -> Result<(), LibraryError> {
        let optional = s2n::s2n_cert_auth_type::OPTIONAL;
        // SAFETY: the configuration is exclusively owned.
        check(unsafe { s2n::s2n_config_set_client_auth_type(self.raw.as_ptr(), optional) })
    }

    /// Trusts these certificate authorities, in PEM.
    pub(crate) fn trust(&mut self, ca_pem: &[u8]) -> Result<(), LibraryError> {
        let pem = CString::new(ca_pem)
            .map_err(|_| LibraryError::invalid("a PEM file contains a null byte"))?;
        // SAFETY: the configuration is exclusively owned; the string ends with a null byte.
        check(unsafe { s2n::s2n_config_add_pem_to_trust_store(self.raw.as_ptr(), pem.as_ptr()) })
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: created by the library, and no connection uses it any more: each holds an `Arc`.
        unsafe { s2n::s2n_config_free(self.raw.as_ptr()) };
    }
}

impl Connection {
    pub(crate) fn new(side: Side, config: &Arc<Config>) -> Result<Self, LibraryError> {
        init()?;
        let mode = match side {
            Side::Client => s2n::s2n_mode::CLIENT,
            Side::Server => s2n::s2n_mode::SERVER,
        };
        // SAFETY: the library is initialized; null is handled.
        let raw = unsafe { s2n::s2n_connection_new(mode) };
        let raw =
            NonNull::new(raw).ok_or_else(|| take_error().unwrap_or_else(LibraryError::blocked))?;
        let config = Arc::clone(config);
        let new = Self { raw, _config: config, replay: Vec::new() };
        let raw = raw.as_ptr();
        // SAFETY: connection and configuration exist; the connection keeps the latter alive.
        check(unsafe { s2n::s2n_connection_set_config(raw, new._config.raw.as_ptr()) })?;
        // By default the library sleeps for 10 to 30 s in the calling thread after an error.
        let blinding = s2n::s2n_blinding::SELF_SERVICE_BLINDING;
        // SAFETY: the connection exists and is exclusively owned; the same below.
        check(unsafe { s2n::s2n_connection_set_blinding(raw, blinding) })?;
        // Full records: the limit of their content is handed over.
        // SAFETY: as above.
        check(unsafe { s2n::s2n_connection_prefer_throughput(raw) })?;
        // The library asks for the header of a record and then for its body, so that it has received
        // nothing that follows the handshake when that ends.
        // SAFETY: as above.
        check(unsafe { s2n::s2n_connection_set_recv_buffering(raw, false) })?;
        // SAFETY: as above; the callback has the type that is expected.
        check(unsafe { s2n::s2n_connection_set_recv_cb(raw, Some(receive)) })?;
        // SAFETY: as above.
        check(unsafe { s2n::s2n_connection_set_send_cb(raw, Some(send)) })?;
        Ok(new)
    }

    /// Adds a key. The library copies it, and overwrites its copy.
    pub(crate) fn append_psk(&mut self, psk: &Psk) -> Result<(), LibraryError> {
        let too_long = |_| LibraryError::invalid("a pre-shared key or its identity is too long");
        let identity_len = u16::try_from(psk.identity.len()).map_err(too_long)?;
        let secret = psk.secret.expose();
        let secret_len = u16::try_from(secret.len()).map_err(too_long)?;
        let hash = match psk.hash {
            Hash::Sha256 => s2n::s2n_psk_hmac::SHA256,
            Hash::Sha384 => s2n::s2n_psk_hmac::SHA384,
            Hash::Sha512 => return Err(LibraryError::invalid("no cipher suite uses SHA-512")),
        };
        // SAFETY: the library is initialized; null is handled.
        let raw = unsafe { s2n::s2n_external_psk_new() };
        let raw = OwnedPsk(
            NonNull::new(raw).ok_or_else(|| take_error().unwrap_or_else(LibraryError::blocked))?,
        );
        let psk_raw = raw.0.as_ptr();
        // SAFETY: the key is exclusively owned; the slice has that length, and is copied.
        check(unsafe { s2n::s2n_psk_set_identity(psk_raw, psk.identity.as_ptr(), identity_len) })?;
        // SAFETY: as above.
        check(unsafe { s2n::s2n_psk_set_secret(psk_raw, secret.as_ptr(), secret_len) })?;
        // SAFETY: the key is exclusively owned.
        check(unsafe { s2n::s2n_psk_set_hmac(psk_raw, hash) })?;
        // SAFETY: both are exclusively owned; the key is copied.
        check(unsafe { s2n::s2n_connection_append_psk(self.raw.as_ptr(), psk_raw) })
    }

    /// Name or address that the certificate of the server has to be for.
    pub(crate) fn set_server_name(&mut self, name: &CStr) -> Result<(), LibraryError> {
        // SAFETY: the connection is exclusively owned; the string ends with a null byte, and is copied.
        check(unsafe { s2n::s2n_set_server_name(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Encrypted bytes that are to be received before those of the stream.
    pub(crate) fn push_received(&mut self, bytes: &[u8]) {
        self.replay.extend_from_slice(bytes);
    }

    /// Makes progress with the handshake.
    pub(crate) fn negotiate(&mut self, io: &mut dyn CipherIo) -> Poll<Result<(), LibraryError>> {
        self.with_io(io, |raw| {
            let mut blocked = s2n::s2n_blocked_status::NOT_BLOCKED;
            // SAFETY: the connection is exclusively owned, and the contexts of its callbacks are set.
            poll(unsafe { s2n::s2n_negotiate(raw, &raw mut blocked) } as isize).map_ok(drop)
        })
    }

    /// Ends the library's part of a connection whose handshake has ended: returns its secrets in the
    /// format of the library, and what it has not consumed of the bytes that came before the stream's.
    ///
    /// # Errors
    ///
    /// If the handshake has not ended, or is not one of TLS 1.3.
    pub(crate) fn hand_over(mut self) -> Result<(SecretBytes, Vec<u8>), LibraryError> {
        let (raw, mut len) = (self.raw.as_ptr(), 0);
        // SAFETY: the connection exists; the result is a variable of this function.
        check(unsafe { s2n::s2n_connection_serialization_length(raw, &raw mut len) })?;
        let mut serialized = Zeroizing::new(vec![0; len as usize]);
        // SAFETY: the connection is exclusively owned; the vector has `len` bytes, and not more are
        // written. The library erases its keys.
        check(unsafe { s2n::s2n_connection_serialize(raw, serialized.as_mut_ptr(), len) })?;
        // Moves the bytes to memory for secrets, and overwrites them here.
        let secrets = SecretBytes::new(std::mem::take(&mut *serialized));
        Ok((secrets, std::mem::take(&mut self.replay)))
    }

    /// Alert of the peer.
    pub(crate) fn alert(&self) -> Option<u8> {
        // SAFETY: the connection exists; the function reads it, and is an error if there is no alert.
        let alert = unsafe { s2n::s2n_connection_get_alert(self.raw.as_ptr()) };
        if alert < 0 {
            take_error();
        }
        u8::try_from(alert).ok()
    }

    /// IANA number of the cipher suite.
    pub(crate) fn cipher_suite(&self) -> Option<u16> {
        let (mut first, mut second) = (0, 0);
        let raw = self.raw.as_ptr();
        // SAFETY: the connection exists; both results are variables of this function.
        let result = unsafe {
            s2n::s2n_connection_get_cipher_iana_value(raw, &raw mut first, &raw mut second)
        };
        check(result).ok().map(|()| u16::from_be_bytes([first, second]))
    }

    /// Whether TLS 1.3 was negotiated.
    pub(crate) fn is_tls13(&self) -> bool {
        // SAFETY: the connection exists; the function only reads it.
        let version = unsafe { s2n::s2n_connection_get_actual_protocol_version(self.raw.as_ptr()) };
        version == s2n::s2n_tls_version::TLS13
    }

    /// Identity of the key that both ends use; `None` if they use none.
    pub(crate) fn psk_identity(&self) -> Option<Vec<u8>> {
        let (raw, mut len) = (self.raw.as_ptr(), 0);
        // SAFETY: the connection exists; the result is a variable of this function.
        check(unsafe { s2n::s2n_connection_get_negotiated_psk_identity_length(raw, &raw mut len) })
            .ok()?;
        let mut identity = vec![0; usize::from(len)];
        // SAFETY: the connection exists; the vector has `len` bytes, and not more are written.
        check(unsafe {
            s2n::s2n_connection_get_negotiated_psk_identity(raw, identity.as_mut_ptr(), len)
        })
        .ok()?;
        Some(identity).filter(|identity| !identity.is_empty())
    }

    /// Runs `act` with `io` behind the callbacks.
    fn with_io<R>(
        &mut self,
        io: &mut dyn CipherIo,
        act: impl FnOnce(*mut s2n::s2n_connection) -> R,
    ) -> R {
        let Self { raw, replay, .. } = self;
        let mut call = Call { io, replay };
        let guard = CallGuard::new(*raw, &mut call);
        let result = act(raw.as_ptr());
        drop(guard);
        result
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: created by the library, exclusively owned, and used no more. Its configuration is
        // dropped afterwards.
        unsafe { s2n::s2n_connection_free(self.raw.as_ptr()) };
    }
}

impl<'a> CallGuard<'a> {
    fn new(raw: NonNull<s2n::s2n_connection>, call: &'a mut Call<'_>) -> Self {
        let context: *mut c_void = (&raw mut *call).cast();
        set_context(raw, context);
        Self { raw, call: PhantomData }
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        set_context(self.raw, null_mut());
    }
}

/// Sets the context of both callbacks.
fn set_context(raw: NonNull<s2n::s2n_connection>, context: *mut c_void) {
    // SAFETY: the connection exists; the library passes the pointer to the callback, and reads nothing
    // there. It fails only for a null connection.
    unsafe { s2n::s2n_connection_set_recv_ctx(raw.as_ptr(), context) };
    // SAFETY: as above.
    unsafe { s2n::s2n_connection_set_send_ctx(raw.as_ptr(), context) };
}

/// Result of a call that may be blocked.
fn poll(result: isize) -> Poll<Result<usize, LibraryError>> {
    match usize::try_from(result) {
        Ok(count) => Poll::Ready(Ok(count)),
        Err(_) => take_error().map_or(Poll::Pending, |error| Poll::Ready(Err(error))),
    }
}

/// Key under construction.
struct OwnedPsk(NonNull<s2n::s2n_psk>);

impl Drop for OwnedPsk {
    fn drop(&mut self) {
        let mut raw = self.0.as_ptr();
        // SAFETY: created by the library, exclusively owned, and used no more.
        unsafe { s2n::s2n_psk_free(&raw mut raw) };
    }
}

/// Receive callback: copies encrypted bytes into the buffer of the library.
///
/// # Safety
///
/// `context` is the [`Call`] of the running call, and `len` bytes at `into` may be written.
unsafe extern "C" fn receive(context: *mut c_void, into: *mut u8, len: u32) -> c_int {
    // SAFETY: the contract: nothing else accesses the `Call` while the library runs.
    let Some(call) = (unsafe { context.cast::<Call<'_>>().as_mut() }) else {
        return fail_with(libc::EIO);
    };
    let len = (len as usize).min(c_int::MAX as usize);
    let is_replay = !call.replay.is_empty();
    let bytes = if is_replay {
        &call.replay[..]
    } else {
        match call.io.received() {
            Received::Bytes(bytes) => bytes,
            Received::End => return 0,
            Received::WouldBlock => return fail_with(libc::EWOULDBLOCK),
        }
    };
    let count = bytes.len().min(len);
    // SAFETY: the contract for the destination; the source is a slice of the owner's, which is no
    // memory of the library.
    unsafe { into.copy_from_nonoverlapping(bytes.as_ptr(), count) };
    if is_replay {
        call.replay.drain(..count);
    } else {
        call.io.consume(count);
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// Send callback: hands encrypted bytes to the owner, who accepts all of them.
///
/// # Safety
///
/// `context` is the [`Call`] of the running call, and `len` bytes at `from` may be read.
unsafe extern "C" fn send(context: *mut c_void, from: *const u8, len: u32) -> c_int {
    // SAFETY: the contract: nothing else accesses the `Call` while the library runs.
    let Some(call) = (unsafe { context.cast::<Call<'_>>().as_mut() }) else {
        return fail_with(libc::EIO);
    };
    let Ok(result) = c_int::try_from(len) else { return fail_with(libc::EMSGSIZE) };
    if len > 0 {
        // SAFETY: the contract: bytes that the library has written, and does not change meanwhile.
        call.io.send(unsafe { std::slice::from_raw_parts(from, len as usize) });
    }
    result
}

/// Verifies no name: a client certificate is accepted for its authority.
///
/// # Safety
///
/// None is needed.
unsafe extern "C" fn accept_every_name(_: *const std::ffi::c_char, _: usize, _: *mut c_void) -> u8 {
    1
}

fn fail_with(errno: c_int) -> c_int {
    // SAFETY: the location is thread-local memory of the C library.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: as above; this thread is the only one that accesses it.
    unsafe { *location = errno };
    -1
}
