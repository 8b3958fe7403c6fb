//! Block layer options of a load: mode, queue map, scheduler and rate limits.

use std::fmt;
use std::num::NonZeroU64;

use tenmil_block::quantity_parser::parse_count;
use tenmil_block::{PER_CHANNEL, QosLimits, QueueMap, RateLimit, Scheduler};

use tenmil_devices::Uri;

/// Layer between a load and its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// None: a channel of the block device, or for an emulated SSD the driver alone.
    None,
    /// A device that only checks claims.
    Bypass,
    /// One queue with one lock.
    Single,
    /// Software queues over hardware contexts (multi-queue).
    Mq,
}

/// Block layer options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerOptions {
    /// Mode. By default emulated SSDs have none and all other devices have multi-queue.
    pub layer: Option<Layer>,
    /// Assignment of channels to hardware contexts.
    pub map: Option<QueueMap>,
    /// Scheduler of the requests to each channel of the device below.
    pub scheduler: Scheduler,
    /// Limit of requests per second and device.
    pub limit_iops: Option<NonZeroU64>,
    /// Limit of bytes per second and device.
    pub limit_bytes: Option<NonZeroU64>,
}

impl Layer {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Mq, Self::Single, Self::Bypass, Self::None];

    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bypass => "bypass",
            Self::Single => "single",
            Self::Mq => "mq",
        }
    }

    /// Mode of the block layer, if there is one.
    pub const fn mode(self) -> Option<tenmil_block::ChannelMode> {
        match self {
            Self::None => None,
            Self::Bypass => Some(tenmil_block::ChannelMode::Bypass),
            Self::Single => Some(tenmil_block::ChannelMode::SingleQueue),
            Self::Mq => Some(tenmil_block::ChannelMode::Mq),
        }
    }
}

impl LayerOptions {
    /// Mode for the device that `uri` names.
    pub fn over(&self, uri: &Uri) -> Layer {
        self.layer.unwrap_or(if uri.emulated().is_some() { Layer::None } else { Layer::Mq })
    }

    /// Rate limits of each device, if there are any.
    pub fn caps(&self) -> Option<QosLimits> {
        let (iops, bytes) = (self.limit_iops, self.limit_bytes);
        let total = RateLimit { iops, bytes };
        (total != RateLimit::default()).then(|| QosLimits { total, ..QosLimits::default() })
    }

    /// First given flag that needs another mode than `layer`.
    pub(super) fn needs_more_than(&self, layer: Layer) -> Option<&'static str> {
        let has_queues = matches!(layer, Layer::Mq | Layer::Single);
        let given = [
            ("--queue-map", self.map.is_some() && layer != Layer::Mq),
            ("--block-scheduler", self.scheduler != Scheduler::None && !has_queues),
            ("--limit-iops", self.limit_iops.is_some() && !has_queues),
            ("--limit-bytes", self.limit_bytes.is_some() && !has_queues),
        ];
        given.iter().find(|(_, lacks)| *lacks).map(|(flag, _)| *flag)
    }
}

/// Parses `default=2,read=1`.
pub fn parse_map(text: &str) -> Result<QueueMap, String> {
    let mut map = QueueMap::with_default(PER_CHANNEL);
    for part in text.split(',') {
        let expected = "expected some of default=N,read=N,poll=N";
        let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}`, {expected}"))?;
        let count = parse_count(value).ok().and_then(|count| u32::try_from(count).ok());
        let count = count.ok_or_else(|| format!("{key} is `{value}`, expected a number"))?;
        match key {
            "default" if count == 0 => return Err("default is 0, expected at least 1".into()),
            "default" => map.default = count,
            "read" => map.read = count,
            "poll" => map.poll = count,
            _ => return Err(format!("no contexts of type `{key}`, {expected}")),
        }
    }
    Ok(map)
}

/// Queue map in the form that is typed.
pub fn show_map(map: &QueueMap) -> String {
    let count = |count: u32| match count {
        PER_CHANNEL => "one for each channel".to_owned(),
        count => count.to_string(),
    };
    let mut text = format!("default={}", count(map.default));
    for (key, value) in [("read", map.read), ("poll", map.poll)].iter().filter(|(_, n)| *n > 0) {
        text += &format!(",{key}={}", count(*value));
    }
    text
}

impl fmt::Display for Layer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use tenmil_block::{PER_CHANNEL, QueueMap};

    use super::{Layer, LayerOptions, parse_map, show_map};

    #[test]
    fn the_bare_driver_is_for_emulated_ssds_unless_somebody_says_otherwise() {
        let over = |layer, uri: &str| {
            LayerOptions { layer, ..LayerOptions::default() }.over(&uri.parse().unwrap())
        };
        assert_eq!((over(None, "emu:null"), over(None, "null:")), (Layer::None, Layer::Mq));
        assert_eq!(over(Some(Layer::Mq), "emu:null"), Layer::Mq);
        assert_eq!(over(Some(Layer::None), "null:"), Layer::None);
    }

    #[test]
    fn a_map_is_read_and_written_alike() {
        let map = QueueMap { default: 2, read: 1, poll: 0 };
        assert_eq!(parse_map("default=2,read=1"), Ok(map));
        assert_eq!(show_map(&map), "default=2,read=1");
        assert_eq!(parse_map("read=1").unwrap().default, PER_CHANNEL);
        assert_eq!(parse_map("default=0"), Err("default is 0, expected at least 1".into()));
        assert_eq!(parse_map("read=x"), Err("read is `x`, expected a number".into()));
        let expected = "expected some of default=N,read=N,poll=N";
        assert_eq!(parse_map("2"), Err(format!("`2`, {expected}")));
        assert_eq!(parse_map("write=2"), Err(format!("no contexts of type `write`, {expected}")));
    }
}
