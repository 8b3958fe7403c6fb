//! Events of the vfio-user and vhost-user endpoints.

/// Event of an endpoint that serves one client at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointEvent {
    /// A client connected. Describes the client.
    Connected(String),
    /// The client disconnected, or was disconnected for the given reason.
    Disconnected(Option<String>),
    /// An error that is worth reporting to the operator.
    Error(String),
}

impl EndpointEvent {
    /// Prefixes the text with the endpoint's address, to tell endpoints of one process apart.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let named = |text| format!("{place}: {text}");
        match self {
            Self::Connected(who) => Self::Connected(named(who)),
            Self::Disconnected(why) => Self::Disconnected(why.map(named)),
            Self::Error(text) => Self::Error(named(text)),
        }
    }
}
