//! Common part of the vfio-user, vhost-user and ublk endpoints: opening and claiming devices, and the
//! event loop until shutdown.

use std::sync::Arc;

use tenmil_block::uri::Uri;
use tenmil_block::{
    Bdev, BdevDescriptor, BdevEvent, BdevOptions, Claim, Opener, QosLimiter, QosLimits, RateLimit,
};
use tenmil_dma::RegionTable;
use tenmil_reactor::Reactors;
use tenmil_rpc::{EventRelay, RpcServer};
use tenmil_serve::{DeviceSlowIo, EndpointEvent};

use super::{
    ServeArguments, WATCH_INTERVAL, event_log, event_sender, log_slow_io, sandbox, service_manager,
};
use crate::commands::rpc_endpoint;
use tenmil_base::Error;
use tenmil_devices::pcie::lacks_iommu;

/// Opens a device and claims it for `holder`, with the configured rate limits.
pub(super) fn open_and_claim(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &RegionTable,
    options: BdevOptions,
    holder: &str,
) -> Result<(Bdev, BdevDescriptor), Error> {
    let ServeArguments { read_only, limit_iops, limit_bytes, .. } = arguments;
    let refuse = |why: Error| cannot_serve_error(uri, why);
    let wanted = if *read_only { uri.clone().read_only() } else { uri.clone() };
    let opener = Opener { regions, clock: options.clock, seed: 1, kinds: tenmil::KINDS };
    let opened = opener.open(&wanted).map_err(refuse)?;
    let total = RateLimit { iops: *limit_iops, bytes: *limit_bytes };
    let limiter = QosLimiter::new(QosLimits { total, ..QosLimits::default() });
    let is_limited = limit_iops.is_some() || limit_bytes.is_some();
    let options = BdevOptions { limiter: is_limited.then_some(limiter), ..options };
    let device = Bdev::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
    let claim = if *read_only { Claim::ReadShared } else { Claim::WriteOnce };
    let descriptor = device
        .open(claim, holder)
        .map_err(|why| Error::new(why.category(), format!("serve {uri:#}: {why}")))?;
    Ok((device, descriptor))
}

/// Rejects devices that cannot access guest memory: without an IOMMU, DMA needs physically contiguous
/// memory, and guest memory is scattered.
pub(super) fn check_device_can_access_guest_memory(uri: &Uri) -> Result<(), Error> {
    if !lacks_iommu(uri) {
        return Ok(());
    }
    Err(Error::usage(format!(
        "serve {uri:#} to a virtual machine: its memory is not contiguous, and an SSD without an IOMMU \
         needs contiguous memory, expected one behind an IOMMU"
    ))
    .with_hint("Serve it with `--listen tcp://…`, `nbd:` or `ublk:`, which use their own memory."))
}

/// Error for a device that cannot be served.
pub(super) fn cannot_serve_error(uri: &Uri, why: Error) -> Error {
    Error::new(why.category(), format!("serve {uri:#}: {why}"))
}

/// Logs the events of a device, and calls `resized` if its size changed.
pub(super) fn log_device_event(uri: &Uri, descriptor: &BdevDescriptor, mut resized: impl FnMut()) {
    while let Some(event) = descriptor.next_event() {
        match event {
            BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => resized(),
            BdevEvent::Removed => {
                tracing::warn!(cause = %uri, "{uri:#} was removed; all further I/O to it fails")
            }
            BdevEvent::MediumError { lba, blocks } => {
                tracing::warn!(cause = %uri, "{uri:#} has lost {blocks} blocks from {lba} on");
            }
            BdevEvent::MediumChanged => tracing::info!(cause = %uri, "{uri:#} has been changed"),
        }
    }
}

/// Logs disconnects, errors and slow requests and relays events to RPC clients, until SIGTERM or Ctrl-C.
pub(super) fn run_until_stopped(
    mut requested: Option<(RpcServer, EventRelay)>,
    reactors: &Reactors,
    slow_io: &[Arc<DeviceSlowIo>],
    who: &str,
    next_news: impl Fn() -> Option<EndpointEvent>,
) {
    while !tenmil_linux::signal::is_stop_requested() {
        while let Some(new_events) = next_news() {
            event_log::log_endpoint_event(who, &new_events);
        }
        for slow_io in slow_io {
            log_slow_io(slow_io.export().log(), event_sender(&requested));
        }
        sandbox::log_denied_calls(event_sender(&requested));
        service_manager::keep_alive(reactors);
        service_manager::reload_on_request(event_sender(&requested));
        if let Some((_, relay)) = &mut requested {
            relay.forward_events(&rpc_endpoint::reactors_handle(reactors));
        }
        tenmil_linux::named_thread::sleep(WATCH_INTERVAL);
    }
    service_manager::report_stopping();
}

#[cfg(test)]
mod tests {
    use super::check_device_can_access_guest_memory;

    #[test]
    fn ssd_without_guest_memory_access_is_rejected() {
        let check = |text: &str| check_device_can_access_guest_memory(&text.parse().unwrap());
        let refused = check("split:[pcie:5e:00.0?unsafe-no-iommu=yes]/1").unwrap_err();
        assert!(refused.text.contains("expected one behind an IOMMU"), "{refused:?}");
        assert!(refused.hint.unwrap().contains("tcp://"));
        assert!(check("pcie:5e:00.0").is_ok() && check("ram:1m").is_ok());
    }
}
