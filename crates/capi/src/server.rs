//! Servers: devices that the program implements, and devices by URI, over NVMe/TCP and NBD.

use std::ffi::{c_char, c_void};
use std::ptr::null;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil::{Access, Export, Runtime, Server};
use tenmil_linux::CpuList;

use crate::c_string::{SizedStruct, copy_string, copy_text_out, load_sized, store};
use crate::failure::{Failure, TENMIL_ERROR_THREAD, TENMIL_OK, run};
use crate::handles::HandleTable;
use crate::program_device::{DeviceFunctions, DeviceProperties, ProgramDevice};

/// Running server. A number: copies refer to the same server.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerHandle {
    /// Zero is no server.
    pub id: u64,
}

/// Namespaces of a subsystem over NVMe/TCP.
pub const TENMIL_SERVE_NVME_TCP: u32 = 1;
/// One device over NBD.
pub const TENMIL_SERVE_NBD: u32 = 2;

/// Flag of a server: every client that reaches the address may connect, also from other machines.
pub const TENMIL_SERVE_ALLOW_ANY_HOST: u32 = 1;

/// Flag of an export: clients cannot write.
pub const TENMIL_EXPORT_READ_ONLY: u32 = 1;

/// Device that a server exports: one that the program implements, or one by URI. Set all bytes to zero first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExportedDevice {
    /// Name, for NBD clients and in messages.
    pub name: *const c_char,
    /// URI of the device, or NULL for a device that the program implements.
    pub uri: *const c_char,
    /// Functions of a device that the program implements.
    pub functions: *const DeviceFunctions,
    /// Properties of a device that the program implements.
    pub properties: *const DeviceProperties,
    /// Passed to the function open_channel.
    pub device: *mut c_void,
    /// TENMIL_EXPORT_... or zero.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Options of a server. Set all bytes to zero and `size` to sizeof of the structure. Everything it points to
/// belongs to the caller and is read during the call only; devices of the program are used until the server
/// has been stopped.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ServerOptions {
    /// Size of this structure in bytes.
    pub size: u32,
    /// TENMIL_SERVE_NVME_TCP or TENMIL_SERVE_NBD.
    pub protocol: u32,
    /// IP address and port, such as `127.0.0.1:4420` or `[::1]:0`; port 0 selects a free one. NBD also listens
    /// at the path of a Unix socket, which begins with "/" or "./".
    pub address: *const c_char,
    /// NQN of the subsystem, over NVMe/TCP. NULL: "nqn.2026-01.org.tenmil:disk".
    pub nqn: *const c_char,
    /// NQNs of the hosts that may connect, over NVMe/TCP. An address of other than loopback needs them or
    /// TENMIL_SERVE_ALLOW_ANY_HOST.
    pub allowed_hosts: *const *const c_char,
    /// Devices: one for NBD; over NVMe/TCP the first is namespace 1.
    pub exports: *const ExportedDevice,
    /// Number of allowed hosts.
    pub allowed_host_count: u32,
    /// Number of devices.
    pub export_count: u32,
    /// Threads that serve connections and call the functions of devices; zero means 1.
    pub threads: u32,
    /// TENMIL_SERVE_ALLOW_ANY_HOST or zero.
    pub flags: u32,
}

const _: () = assert!(size_of::<ServerOptions>() == 56 && size_of::<ExportedDevice>() == 48);

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            size: 0,
            protocol: 0,
            address: null(),
            nqn: null(),
            allowed_hosts: null(),
            exports: null(),
            allowed_host_count: 0,
            export_count: 0,
            threads: 0,
            flags: 0,
        }
    }
}

// SAFETY: integers and pointers in the layout of C, the first of which is the size.
unsafe impl SizedStruct for ServerOptions {
    const FIRST_SIZE: usize = 56;
}

/// A server with its threads. The devices of the program are closed when the runtime has been dropped.
struct RunningServer {
    /// Taken out when it is stopped. The lock is only for the table, which threads share.
    server: Mutex<Server>,
    uris: Vec<String>,
    runtime: Runtime,
}

static SERVERS: HandleTable<RunningServer> = HandleTable::new("server");

/// Memory for buffers of a server's runtime, which has few of its own.
const BUFFER_BYTES: u32 = 1 << 20;
/// Most devices and hosts of one server.
const COUNT_MAX: u32 = 1024;

/// Starts a server with threads of its own, and stores it in `*server`. Blocks until it listens.
///
/// The server belongs to the caller, which stops it by tenmil_server_stop().
///
/// # Safety
///
/// `options` is NULL or as long as its field `size`, and what it points to is as it describes; `server` is NULL
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_server_start(
    options: *const ServerOptions,
    server: *mut ServerHandle,
) -> i32 {
    run("tenmil_server_start", || {
        refuse_on_reactor("tenmil_server_start")?;
        // SAFETY: the caller promises that it may be written. Nothing is started without a place for it.
        unsafe { store("server", server, ServerHandle { id: 0 }) }?;
        // SAFETY: the caller promises the same of the options.
        let options = unsafe { load_sized("options", options) }?;
        // SAFETY: the caller promises the same of what they point to.
        let running = unsafe { start(&options) }?;
        let id = SERVERS.add(Arc::new(running));
        // SAFETY: as above.
        unsafe { store("server", server, ServerHandle { id }) }?;
        Ok(TENMIL_OK)
    })
}

/// Writes what clients open to `uri`, as much as fits into `size` bytes with the terminating NUL: over NVMe/TCP
/// the URI of namespace `index` + 1 for tenmil_open(), over NBD that of the export for NBD clients. Returns the
/// length of the whole URI without the NUL.
///
/// The buffer belongs to the caller.
///
/// # Safety
///
/// `uri` is valid for writes of `size` bytes, or `size` is zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_server_uri(
    server: ServerHandle,
    index: u32,
    uri: *mut c_char,
    size: usize,
) -> i32 {
    run("tenmil_server_uri", || {
        let running = SERVERS.get(server.id)?;
        let uris = &running.uris;
        let Some(text) = uris.get(index as usize) else {
            let count = uris.len();
            return Err(Failure::usage(format_args!(
                "URI of a server: index is {index}, expected less than {count}"
            )));
        };
        // SAFETY: the caller promises the same of the buffer.
        let len = unsafe { copy_text_out(text, uri, size) };
        Ok(i32::try_from(len).unwrap_or(i32::MAX))
    })
}

/// Stops a server: it accepts no more connections, closes those it has once their requests have completed, and
/// closes the devices. Blocks until the functions of the program are not called any more. It must not be called
/// by one of them.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_server_stop(server: ServerHandle) -> i32 {
    run("tenmil_server_stop", || {
        refuse_on_reactor("tenmil_server_stop")?;
        let running = SERVERS.remove_unused(server.id, "other threads")?;
        // A call of another thread that has failed may still hold it for an instant.
        let Some(RunningServer { server, runtime, .. }) = Arc::into_inner(running) else {
            return Err(Failure::busy("stop the server: a call of another thread uses it"));
        };
        let server = server.into_inner().unwrap_or_else(PoisonError::into_inner);
        runtime.block_on(server.stop());
        // Closes the devices, and waits for that.
        drop(runtime);
        Ok(TENMIL_OK)
    })
}

/// Refuses a call that waits, from a function of a device.
fn refuse_on_reactor(function: &str) -> Result<(), Failure> {
    if tenmil_linux::event_loop::is_in_event_loop() {
        return Err(Failure::new(
            TENMIL_ERROR_THREAD,
            format_args!(
                "{function}: it is called by a function of a served device, which must not wait, \
                 expected another thread"
            ),
        ));
    }
    Ok(())
}

/// Starts a server.
///
/// # Safety
///
/// What the options point to is as they describe, and so are the devices until the server has been stopped.
unsafe fn start(options: &ServerOptions) -> Result<RunningServer, Failure> {
    let ServerOptions { protocol, allowed_host_count, export_count, threads, flags, .. } = *options;
    if flags & !TENMIL_SERVE_ALLOW_ANY_HOST != 0 || allowed_host_count > COUNT_MAX {
        return Err(Failure::usage(format_args!(
            "serve: flags are {flags:#x} with {allowed_host_count} hosts, expected \
             TENMIL_SERVE_ALLOW_ANY_HOST or 0, and at most {COUNT_MAX} hosts"
        )));
    }
    if options.exports.is_null() || export_count == 0 || export_count > COUNT_MAX {
        return Err(Failure::usage(format_args!(
            "serve: {export_count} devices at {:p}, expected 1 to {COUNT_MAX}",
            options.exports
        )));
    }
    // SAFETY: the caller promises that it is NULL or a string.
    let address = unsafe { copy_string("address", options.address) }?;
    let mut export = match protocol {
        TENMIL_SERVE_NVME_TCP => Export::nvme_tcp(address),
        TENMIL_SERVE_NBD => Export::nbd(address),
        _ => {
            return Err(Failure::usage(format_args!(
                "serve: protocol is {protocol}, expected TENMIL_SERVE_NVME_TCP or TENMIL_SERVE_NBD"
            )));
        }
    };
    if !options.nqn.is_null() {
        // SAFETY: not null, and the caller promises that it is a string.
        export = export.nqn(&unsafe { copy_string("nqn", options.nqn) }?);
    }
    if allowed_host_count > 0 && options.allowed_hosts.is_null() {
        return Err(Failure::usage("allowed_hosts: found NULL, expected an array"));
    }
    for index in 0..allowed_host_count as usize {
        // SAFETY: not null, and the caller promises that the array has as many strings.
        let host = unsafe { options.allowed_hosts.add(index) };
        // SAFETY: as above.
        let host = unsafe { host.read() };
        // SAFETY: as above.
        export = export.allow_host(&unsafe { copy_string("allowed_hosts", host) }?);
    }
    if flags & TENMIL_SERVE_ALLOW_ANY_HOST != 0 {
        export = export.allow_any_host();
    }
    let cores = CpuList::allowed_cpus();
    let cores = cores.iter().take(threads.max(1) as usize);
    let runtime = Runtime::builder().cores(cores).pin(false).buffer_bytes(BUFFER_BYTES).start()?;
    // SAFETY: not null, and the caller promises as many structures.
    let exports = unsafe { std::slice::from_raw_parts(options.exports, export_count as usize) };
    for exported in exports {
        // SAFETY: the caller promises the same of each device.
        let (name, device) = unsafe { open(&runtime, exported) }?;
        export = match protocol {
            TENMIL_SERVE_NBD => export.device(&name, device),
            _ => export.namespace(device),
        };
    }
    let server = runtime.block_on(runtime.serve(export))?;
    let uris = server.uris().to_vec();
    Ok(RunningServer { server: Mutex::new(server), uris, runtime })
}

/// Opens a device that is to be exported.
///
/// # Safety
///
/// Its pointers are as the structure describes, until the server has been stopped.
unsafe fn open(
    runtime: &Runtime,
    exported: &ExportedDevice,
) -> Result<(String, tenmil::Device), Failure> {
    // SAFETY: the caller promises that it is NULL or a string.
    let name = unsafe { copy_string("name of an export", exported.name) }?;
    if exported.flags & !TENMIL_EXPORT_READ_ONLY != 0 {
        let flags = exported.flags;
        return Err(Failure::usage(format_args!(
            "export {name}: flags are {flags:#x}, expected TENMIL_EXPORT_READ_ONLY or 0"
        )));
    }
    let is_read_only = exported.flags & TENMIL_EXPORT_READ_ONLY != 0;
    if !exported.uri.is_null() {
        // SAFETY: not null, and the caller promises that it is a string.
        let uri = unsafe { copy_string("uri", exported.uri) }?;
        let access = if is_read_only { Access::ReadOnly } else { Access::ReadWrite };
        return Ok((name, runtime.block_on(runtime.open(&uri, access))?));
    }
    if exported.functions.is_null() || exported.properties.is_null() {
        return Err(Failure::usage(format_args!(
            "export {name}: found NULL, expected a URI, or functions and properties of a device"
        )));
    }
    // SAFETY: not null, and the caller promises the structure with its size.
    let properties = unsafe { load_sized("properties", exported.properties) }?;
    // SAFETY: not null, and the caller promises the structure.
    let functions = unsafe { exported.functions.read() };
    let regions = runtime.regions();
    // SAFETY: the caller promises that the functions may be called with the device until the server has been
    // stopped, which closes all channels.
    let device =
        unsafe { ProgramDevice::new(&name, &properties, &functions, exported.device, regions) }?;
    let is_read_only = is_read_only || !device.is_writable();
    let access = if is_read_only { Access::ReadOnly } else { Access::ReadWrite };
    let attached = runtime.block_on(runtime.attach(&name, Arc::new(device), access))?;
    Ok((name, attached))
}
