//! Parameters of storage classes and of classes of volume attributes.

use std::collections::BTreeMap;

use crate::status::{CallResult, Status};

/// Parameters of a storage class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeParameters {
    /// Name or UUID of the pool; by default the only one.
    pub(crate) pool: Option<String>,
    pub(crate) is_thick: bool,
    pub(crate) has_checksums: bool,
}

/// Rate limits: parameters of the method `subsystem_limits`.
pub(crate) type Limits = BTreeMap<&'static str, u64>;

/// Names of mutable parameters, and of the parameters of the method `subsystem_limits`.
const LIMITS: [(&str, &str); 7] = [
    ("iops", "iops"),
    ("read-iops", "read_iops"),
    ("write-iops", "write_iops"),
    ("bytes", "bytes"),
    ("read-bytes", "read_bytes"),
    ("write-bytes", "write_bytes"),
    ("burst-ms", "burst_ms"),
];

/// Prefix of parameters that the sidecars of Kubernetes add.
const SIDECAR_PREFIX: &str = "csi.storage.k8s.io/";

impl VolumeParameters {
    pub(crate) fn parse(given: &BTreeMap<String, String>) -> CallResult<Self> {
        let mut parameters = Self::default();
        for (name, value) in given {
            match name.as_str() {
                "pool" => parameters.pool = Some(value.clone()),
                "thick" => parameters.is_thick = parse_flag(name, value)?,
                "checksums" => parameters.has_checksums = parse_flag(name, value)?,
                name if name.starts_with(SIDECAR_PREFIX) => {}
                name => return Err(unknown(name, "pool, thick or checksums")),
            }
        }
        if parameters.is_thick && parameters.has_checksums {
            let text = "parameters: thick and checksums, expected one of them";
            return Err(Status::invalid_argument(text));
        }
        Ok(parameters)
    }
}

/// Parses mutable parameters.
pub(crate) fn parse_limits(given: &BTreeMap<String, String>) -> CallResult<Limits> {
    let parse = |(name, value): (&String, &String)| {
        let known = LIMITS.iter().find(|(known, _)| known == name);
        let expected = LIMITS.map(|(name, _)| name).join(", ");
        let (_, parameter) = known.ok_or_else(|| unknown(name, &expected))?;
        let number = value.parse().map_err(|_| {
            Status::invalid_argument(format!("parameter {name}: `{value}`, expected a number"))
        })?;
        Ok((*parameter, number))
    };
    given.iter().map(parse).collect()
}

/// Refuses parameters of snapshots: there are none.
pub(crate) fn check_no_parameters(given: &BTreeMap<String, String>) -> CallResult<()> {
    match given.keys().find(|name| !name.starts_with(SIDECAR_PREFIX)) {
        Some(name) => Err(unknown(name, "none")),
        None => Ok(()),
    }
}

fn parse_flag(name: &str, value: &str) -> CallResult<bool> {
    value.parse().map_err(|_| {
        Status::invalid_argument(format!("parameter {name}: `{value}`, expected true or false"))
    })
}

fn unknown(name: &str, expected: &str) -> Status {
    Status::invalid_argument(format!("parameter `{name}`: unknown, expected {expected}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{VolumeParameters, check_no_parameters, parse_limits};
    use crate::status::Code;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn unknown_and_malformed_parameters_are_refused() {
        let known = map(&[("pool", "p"), ("thick", "true"), ("csi.storage.k8s.io/pvc/name", "x")]);
        let parsed = VolumeParameters::parse(&known).unwrap();
        assert_eq!((parsed.pool.as_deref(), parsed.is_thick), (Some("p"), true));
        for wrong in
            [&[("size", "1")][..], &[("thick", "1")], &[("thick", "true"), ("checksums", "true")]]
        {
            let refused = VolumeParameters::parse(&map(wrong)).unwrap_err();
            assert_eq!(refused.code, Code::InvalidArgument, "{wrong:?}");
        }
        assert_eq!(parse_limits(&map(&[("read-iops", "7")])).unwrap()["read_iops"], 7);
        for wrong in [("iops", "-1"), ("IOPS", "1"), ("iops", "")] {
            assert!(parse_limits(&map(&[wrong])).is_err(), "{wrong:?}");
        }
        assert!(check_no_parameters(&map(&[("x", "y")])).is_err());
    }
}
