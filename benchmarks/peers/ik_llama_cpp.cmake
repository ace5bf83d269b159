# Its source distribution lacks this script, which writes the version that its programs print.
set(script "${CMAKE_SOURCE_DIR}/vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake")
if(NOT EXISTS "${script}")
    file(WRITE "${script}" [[
file(WRITE "${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp" "
int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = \"unknown\";
char const *LLAMA_COMPILER = \"unknown\";
char const *LLAMA_BUILD_TARGET = \"unknown\";
")
]])
endif()
# Its libraries and programs find each other where they are installed.
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib")
