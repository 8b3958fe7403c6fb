//! What serving guests of one device, or of a few, has in common: the device is opened and claimed, and
//! what happens is told until somebody ends it.

use block::uri::Uri;
use block::{
    Caps, Claim, Descriptor, Device, DeviceOptions, Event, Limiter, MediumError, Opener, Rate,
};
use control::{Relay, Server};
use dma::Regions;
use reactor::Reactors;
use target::News;

use super::{ServeArguments, WATCH_INTERVAL};
use crate::Refused;
use crate::cli::running;
use crate::pcie::lacks_iommu;

/// Opens a device and claims it for `holder`, with the limits that were asked for.
pub(super) fn claim(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &Regions,
    options: DeviceOptions,
    holder: &str,
) -> Result<(Device, Descriptor), Refused> {
    let ServeArguments { read_only, limit_iops, limit_bytes, .. } = arguments;
    let refuse = |why: MediumError| refused(uri, why);
    let wanted = if *read_only { uri.clone().to_read() } else { uri.clone() };
    let opener = Opener { regions, clock: options.clock, seed: 1, more: crate::KINDS };
    let opened = opener.open(&wanted).map_err(refuse)?;
    let total = Rate { iops: *limit_iops, bytes: *limit_bytes };
    let limiter = Limiter::new(Caps { total, ..Caps::default() });
    let is_limited = limit_iops.is_some() || limit_bytes.is_some();
    let options = DeviceOptions { limiter: is_limited.then_some(limiter), ..options };
    let device = Device::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
    let claim = if *read_only { Claim::ReadShared } else { Claim::WriteOnce };
    let descriptor = device
        .open(claim, holder)
        .map_err(|why| Refused::of(why.blame(), format!("serve {uri}: {why}")))?;
    Ok((device, descriptor))
}

/// Whether data can go between the device and a guest's memory, which lies scattered in the machine.
pub(super) fn check_guest_memory(uri: &Uri) -> Result<(), Refused> {
    if !lacks_iommu(uri) {
        return Ok(());
    }
    Err(Refused::caller(format!(
        "serve {uri} to a guest: memory of guests does not lie in a row, and an SSD without an IOMMU \
         finds no other, expected one behind an IOMMU"
    ))
    .with_hint("Serve it with `--listen tcp://…`, `nbd:` or `ublk:`, which have memory of their own."))
}

/// Why a device is not served.
pub(super) fn refused(uri: &Uri, why: MediumError) -> Refused {
    Refused::of(why.blame(), format!("serve {uri}: {why}"))
}

/// Tells what has happened to a device; that it has another size now, to whom it is served.
pub(super) fn hear(uri: &Uri, descriptor: &Descriptor, mut resized: impl FnMut()) {
    while let Some(event) = descriptor.next_event() {
        match event {
            Event::Resized { .. } | Event::Overflowed { .. } => resized(),
            Event::Removed => {
                tracing::warn!(cause = %uri, "{uri} is gone, and nothing of it can be had any more")
            }
            Event::MediumError { lba, blocks } => {
                tracing::warn!(cause = %uri, "{uri} has lost {blocks} blocks from {lba} on");
            }
            Event::MediumChanged => tracing::info!(cause = %uri, "{uri} has been changed"),
        }
    }
}

/// Tells of guests that are sent away and of trouble, and answers those who ask this process, until
/// somebody ends it.
pub(super) fn watch(
    mut asked: Option<(Server, Relay)>,
    reactors: &Reactors,
    who: &str,
    next_news: impl Fn() -> Option<News>,
) {
    while !host::signal::interrupted() {
        while let Some(news) = next_news() {
            match news {
                News::Left(Some(why)) => tracing::info!("the {who} was sent away: {why}"),
                News::Trouble(text) => tracing::info!("{text}"),
                News::Came(_) | News::Left(None) => {}
            }
        }
        if let Some((_, relay)) = &mut asked {
            relay.pass_on(&running::of(reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::check_guest_memory;

    #[test]
    fn a_guest_is_not_given_an_ssd_that_cannot_find_its_memory() {
        let check = |text: &str| check_guest_memory(&text.parse().unwrap());
        let refused = check("split:[pcie:5e:00.0?unsafe-no-iommu=yes]/1").unwrap_err();
        assert!(refused.text.contains("expected one behind an IOMMU"), "{refused:?}");
        assert!(refused.hint.unwrap().contains("tcp://"));
        assert!(check("pcie:5e:00.0").is_ok() && check("ram:1m").is_ok());
    }
}
