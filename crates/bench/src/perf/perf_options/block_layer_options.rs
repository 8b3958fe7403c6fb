//! Block layer options of a load: mode, queue map, scheduler and rate limits.

use std::fmt;
use std::num::NonZeroU64;

use tenmil_block::quantity_parser::parse_count;
use tenmil_block::{IoScheduler, PER_CHANNEL, QosLimits, QueueMap, RateLimit};

use tenmil_devices::Uri;

/// Layer between a load and its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockLayerMode {
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
pub struct BlockLayerOptions {
    /// Mode. By default emulated SSDs have none and all other devices have multi-queue.
    pub layer: Option<BlockLayerMode>,
    /// Assignment of channels to hardware contexts.
    pub map: Option<QueueMap>,
    /// Scheduler of the requests to each channel of the device below.
    pub scheduler: IoScheduler,
    /// Limit of requests per second and device.
    pub limit_iops: Option<NonZeroU64>,
    /// Limit of bytes per second and device.
    pub limit_bytes: Option<NonZeroU64>,
}

impl BlockLayerMode {
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

impl BlockLayerOptions {
    /// Mode for the device that `uri` names.
    pub fn layer_of_device(&self, uri: &Uri) -> BlockLayerMode {
        self.layer.unwrap_or(if uri.emulated().is_some() {
            BlockLayerMode::None
        } else {
            BlockLayerMode::Mq
        })
    }

    /// Rate limits of each device, if there are any.
    pub fn qos_limits(&self) -> Option<QosLimits> {
        let (iops, bytes) = (self.limit_iops, self.limit_bytes);
        let total = RateLimit { iops, bytes };
        (total != RateLimit::default()).then(|| QosLimits { total, ..QosLimits::default() })
    }

    /// First given flag that needs another mode than `layer`.
    pub(super) fn first_unsupported_flag(&self, layer: BlockLayerMode) -> Option<&'static str> {
        let has_queues = matches!(layer, BlockLayerMode::Mq | BlockLayerMode::Single);
        let given = [
            ("--queue-map", self.map.is_some() && layer != BlockLayerMode::Mq),
            ("--block-scheduler", self.scheduler != IoScheduler::None && !has_queues),
            ("--limit-iops", self.limit_iops.is_some() && !has_queues),
            ("--limit-bytes", self.limit_bytes.is_some() && !has_queues),
        ];
        given.iter().find(|(_, lacks)| *lacks).map(|(flag, _)| *flag)
    }
}

/// Parses `default=2,read=1`.
pub fn parse_queue_map(text: &str) -> Result<QueueMap, String> {
    let mut map = QueueMap::with_default_contexts(PER_CHANNEL);
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
pub fn queue_map_text(map: &QueueMap) -> String {
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

impl fmt::Display for BlockLayerMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use tenmil_block::{PER_CHANNEL, QueueMap};

    use super::{BlockLayerMode, BlockLayerOptions, parse_queue_map, queue_map_text};

    #[test]
    fn driver_is_loaded_without_block_layer_only_for_emulated_ssds_by_default() {
        let over = |layer, uri: &str| {
            BlockLayerOptions { layer, ..BlockLayerOptions::default() }
                .layer_of_device(&uri.parse().unwrap())
        };
        assert_eq!(
            (over(None, "emu:null"), over(None, "null:")),
            (BlockLayerMode::None, BlockLayerMode::Mq)
        );
        assert_eq!(over(Some(BlockLayerMode::Mq), "emu:null"), BlockLayerMode::Mq);
        assert_eq!(over(Some(BlockLayerMode::None), "null:"), BlockLayerMode::None);
    }

    #[test]
    fn queue_map_text_parses_back() {
        let map = QueueMap { default: 2, read: 1, poll: 0 };
        assert_eq!(parse_queue_map("default=2,read=1"), Ok(map));
        assert_eq!(queue_map_text(&map), "default=2,read=1");
        assert_eq!(parse_queue_map("read=1").unwrap().default, PER_CHANNEL);
        assert_eq!(parse_queue_map("default=0"), Err("default is 0, expected at least 1".into()));
        assert_eq!(parse_queue_map("read=x"), Err("read is `x`, expected a number".into()));
        let expected = "expected some of default=N,read=N,poll=N";
        assert_eq!(parse_queue_map("2"), Err(format!("`2`, {expected}")));
        assert_eq!(
            parse_queue_map("write=2"),
            Err(format!("no contexts of type `write`, {expected}"))
        );
    }
}
